"""Tensors whose cells are computed from their positions, so that no rank needs a full tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch

from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box
from gpudist.world.partition import CartesianPartition

# Whole numbers small enough that sums over a million ranks are exact in float32.
NUMBERS = 13


def grid_of(ranks: int, dims: int) -> tuple[int, ...]:
    """Divide the ranks over the spatial dims, after batch and channels, as evenly as possible."""
    grid = [1] * (dims - 2)
    for factor in sorted(_primes(ranks), reverse=True):
        grid[grid.index(min(grid))] *= factor
    return (1, 1, *sorted(grid, reverse=True))


def _primes(n: int) -> list[int]:
    found: list[int] = []
    for p in range(2, n + 1):
        while n % p == 0:
            found.append(p)
            n //= p
    return found


def cells(
    shape: Sequence[int], box: Box, device: torch.device, seed: int = 0, width: int = 0
) -> torch.Tensor:
    """Return the cells of ``box`` in the tensor of global shape ``shape``, zeros beyond its edges.

    Args:
        shape: global shape of the tensor.
        box: range of cells.
        device: device of the result.
        seed: number that distinguishes tensors.
        width: cells added to the box on both sides of each spatial dim.
    """
    widths = [width if dim >= 2 else 0 for dim in range(len(shape))]
    lines: list[torch.Tensor] = []
    inside: list[torch.Tensor] = []
    for dim, extent in enumerate(shape):
        places = torch.arange(box.start[dim] - widths[dim], box.stop[dim] + widths[dim])
        line = [-1 if d == dim else 1 for d in range(len(shape))]
        # Each dim contributes a remainder; their sum gives the remainder of the cell's number.
        part = places * prod(shape[dim + 1 :]) % NUMBERS
        lines.append(part.view(line).to(device, torch.float32))
        inside.append(((places >= 0) & (places < extent)).view(line).to(device))
    numbers = reduce(torch.add, lines).add_(seed).remainder_(NUMBERS).add_(1)
    return numbers.mul_(reduce(torch.logical_and, inside))


def box_of(shape: Sequence[int], P: CartesianPartition) -> Box:
    """Return the box of this rank."""
    assert P.index is not None
    return Decomposition.balanced(tuple(shape), P.shape).block(P.index)


def own(shape: Sequence[int], P: CartesianPartition, seed: int = 0, width: int = 0) -> torch.Tensor:
    """Return this rank's cells on the world's device."""
    return cells(shape, box_of(shape, P), P.device, seed, width)


def line(count: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return a flat tensor of ``count`` cells."""
    return cells((count,), Box.whole((count,)), device, seed)
