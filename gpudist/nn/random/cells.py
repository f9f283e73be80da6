"""Random values of a global tensor, of which each worker draws only its own block."""

from __future__ import annotations

from collections.abc import Iterator
from math import pi, prod

import torch

from gpudist.geometry.boxes import Box

# A tile of 8 bytes per cell fits in a CPU's cache; a GPU needs more cells for full occupancy.
_TILE_CELLS = 1 << 17
_TILE_CELLS_OF_GPU = 1 << 22
# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_FACTORS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def kept_by_index(
    seed: torch.Tensor,
    call: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    p: float,
    device: torch.device,
) -> torch.Tensor:
    """Draw which cells of ``box`` are kept, each dropped with probability ``p``.

    The result for a cell depends on the seed, the call number and the cell's global index, but not
    on the worker that owns it.

    Args:
        seed, call: seed and call number, one int64 each.
        box: this worker's box of the global tensor.
        shape: global shape of the tensor.
        p: probability of dropping a cell, between 0 and 1 exclusive.
        device: device of the result.

    Returns:
        New bool tensor of the shape of ``box``, true for kept cells.

    Cost:
        About 25 torch operations on int64 per cell, in tiles of bounded size; no communication.
    """
    if device.type == "meta":
        return torch.empty(box.shape, dtype=torch.bool, device=device)
    dropped_below = int(p * 2.0**64) - (1 << 63)
    kept = torch.empty(box.shape, dtype=torch.bool, device=device)
    for tile, numbers in _numbers(seed, call, box, shape, device):
        kept[tile.shifted(box.start).slices] = numbers >= dropped_below
    return kept


def uniform_by_index(
    seed: torch.Tensor,
    call: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Draw uniform numbers in [0, 1), multiples of a step that the dtype represents exactly.

    A number depends on the same quantities as in :func:`kept_by_index`, which describes the
    arguments.

    Returns:
        New tensor of ``dtype``, of the shape of ``box``.
    """
    drawn = torch.empty(box.shape, dtype=dtype, device=device)
    bits = _BITS[dtype]
    for tile, numbers in _numbers(seed, call, box, shape, device):
        steps = _shifted(numbers, 64 - bits).double() * 2.0**-bits
        drawn[tile.shifted(box.start).slices] = steps.to(dtype)
    return drawn


def normal_by_index(
    seed: torch.Tensor,
    call: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Draw standard normal numbers; for the arguments see :func:`uniform_by_index`.

    Source:
        Box & Muller 1958, from two uniform numbers per cell.
    """
    drawn = torch.empty(box.shape, dtype=dtype, device=device)
    for tile, numbers in _numbers(seed, call, box, shape, device):
        # The number must be above 0, so that the logarithm is finite.
        radius = (_shifted(numbers, 11) + 1).double() * 2.0**-53
        turn = _shifted(_mixed(numbers + _STEP), 11).double() * 2.0**-53
        cells = (-2 * radius.log()).sqrt() * (2 * pi * turn).cos()
        drawn[tile.shifted(box.start).slices] = cells.to(dtype)
    return drawn


def _numbers(
    seed: torch.Tensor,
    call: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    device: torch.device,
) -> Iterator[tuple[Box, torch.Tensor]]:
    first = _mixed(_mixed(seed + _STEP) ^ call)
    second = _mixed(first + _STEP)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    for tile in _tiles(box, _TILE_CELLS if device.type == "cpu" else _TILE_CELLS_OF_GPU):
        yield tile, _mixed(_mixed(_indices(tile, strides, device) + first) ^ second)


def kept_by_torch(box: Box, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """Draw which cells of ``box`` are kept, with the numbers of torch's default CPU generator.

    Every worker draws all cells of the global tensor in order, so that all generators advance by
    the same amount.

    Args:
        box: this worker's box of the global tensor.
        shape: global shape of the tensor.
        p: probability of dropping a cell.

    Returns:
        New bool tensor of the shape of ``box``, true for kept cells.

    Cost:
        One draw per cell of the global tensor, on every worker, in tiles of bounded size.
    """
    kept = torch.empty(box.shape, dtype=torch.bool)
    for tile in _tiles(Box.whole(shape), _TILE_CELLS):
        drawn = torch.empty(tile.shape, dtype=torch.bool).bernoulli_(1 - p)
        common = _common(tile, box)
        if common.volume:
            cells = drawn[common.shifted(tile.start).slices]
            kept[common.shifted(box.start).slices] = cells
    return kept


def _tiles(box: Box, cells: int) -> Iterator[Box]:
    """Split ``box`` into parts of at most ``cells`` cells, in the order of its cells."""
    if box.volume <= cells:
        if box.volume:
            yield box
        return
    d = next(d for d, extent in enumerate(box.shape) if extent > 1)
    middle = (box.start[d] + box.stop[d]) // 2
    yield from _tiles(Box(box.start, (*box.stop[:d], middle, *box.stop[d + 1 :])), cells)
    yield from _tiles(Box((*box.start[:d], middle, *box.start[d + 1 :]), box.stop), cells)


def _common(a: Box, b: Box) -> Box:
    return Box(tuple(map(max, a.start, b.start)), tuple(map(min, a.stop, b.stop)))


def _indices(box: Box, strides: list[int], device: torch.device) -> torch.Tensor:
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop, stride in zip(box.start, box.stop, strides, strict=True):
        along = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        indices = indices.unsqueeze(-1) + along
    return indices


def _mixed(z: torch.Tensor) -> torch.Tensor:
    # A bijection of 64-bit numbers whose results look independent.
    z = (z ^ _shifted(z, 30)) * _FACTORS[0]
    z = (z ^ _shifted(z, 27)) * _FACTORS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    # A logical shift: ``>>`` would repeat the sign bit.
    return (z >> bits) & ((1 << (64 - bits)) - 1)
