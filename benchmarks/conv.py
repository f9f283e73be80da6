"""Convolution layer, forward and backward, compared with torch's convolution of the same block."""

from __future__ import annotations

from math import prod

import torch

from benchmarks.case import Case, Side
from benchmarks.halo import grid_of
from gpudist.nn import DistributedConv2d
from gpudist.world.partition import Partition

SHAPES = ((1, 8, 256, 256), (1, 16, 1024, 1024))
TOLERANCE = 1e-4
Results = tuple[torch.Tensor, ...]


def cases(ranks: int) -> list[Case]:
    """Return the cases.

    Shapes are global, with equal channels in and out; bytes are a rank's block.
    """
    found: list[Case] = []
    for shape in SHAPES:
        grid, block = grid_of(ranks, 4), prod(shape) * 4 // ranks
        name = f"{shape[1]}->{shape[1]} channels, 3x3, global [{','.join(map(str, shape))}]"
        name += f" on [{','.join(map(str, grid))}]"
        found.append(Case("conv", name, ranks, block, {"shape": shape, "grid": grid}, block))
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the output and the gradients of input, weight and bias."""
    shape, grid = case.parameters["shape"], case.parameters["grid"]
    channels = shape[1]
    P_x = P_world.create_cartesian_topology_partition(grid)
    assert P_x.index is not None
    torch.manual_seed(0)
    layer = DistributedConv2d(P_x, channels, channels, 3, padding=1)
    torch.manual_seed(0)
    sequential = torch.nn.Conv2d(channels, channels, 3, padding=1)
    x, gy = torch.rand(shape) - 0.5, torch.rand(shape) - 0.5
    block = tuple(
        slice(i * n // p, (i + 1) * n // p) for i, n, p in zip(P_x.index, shape, grid, strict=True)
    )
    expected_y, expected_gx, *expected_parameters = _both_ways(sequential, x, gy)
    expected_y, expected_gx = expected_y[block], expected_gx[block]
    x, gy = x[block].clone(), gy[block].clone()
    # A convolution of the block alone has the same output only away from the cuts.
    inside = tuple(
        slice(int(p > 1 and i > 0), n // p - int(p > 1 and i < p - 1))
        for i, n, p in zip(P_x.index, shape, grid, strict=True)
    )

    def is_right(results: Results) -> bool:
        y, gx, *parameters = results
        owned = expected_parameters if P_world.rank == 0 else [p[:0] for p in expected_parameters]
        return (
            close(y, expected_y)
            and close(gx, expected_gx)
            and all(
                close(gradient, whole) if whole.numel() else gradient.numel() == 0
                for gradient, whole in zip(parameters, owned, strict=True)
            )
        )

    def is_right_inside(results: Results) -> bool:
        y, gx, *_ = results
        return close(y[inside], expected_y[inside]) and close(gx[inside], expected_gx[inside])

    return {
        "gpudist": Side(lambda: _both_ways(layer, x, gy), is_right),
        "local torch": Side(lambda: _both_ways(sequential, x, gy), is_right_inside),
    }


@torch.enable_grad()
def _both_ways(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> Results:
    x = x.detach().requires_grad_()
    y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], gy))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest cell."""
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * b.abs().max())
