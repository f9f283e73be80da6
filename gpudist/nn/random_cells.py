"""Random cells of a global tensor, of which each worker draws its own block alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from gpudist.geometry.boxes import Box

# A tile's numbers, 8 bytes a cell, stay in a CPU's cache; a GPU needs more cells to be busy.
_TILE_CELLS = 1 << 17
_TILE_CELLS_OF_GPU = 1 << 22
# Of splitmix64 (Steele, Lea and Flood 2014), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def kept_by_index(
    seed: torch.Tensor,
    call: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    p: float,
    device: torch.device,
) -> torch.Tensor:
    """Cells of ``box`` that are kept, each dropped with probability ``p``.

    What becomes of a cell depends on the seed, the number of the call and the cell's index in the
    global tensor, whoever owns it.

    Args:
        seed, call: one int64 each.
        box: of the global tensor.
        shape: of the global tensor, in cells.
        p: between 0 and 1, both excluded.
        device: of the result.

    Returns:
        New tensor of bool, of the shape of ``box``.

    Cost:
        About 25 operations of torch on int64 per cell, in tiles of bounded size; no communication.
    """
    if device.type == "meta":
        return torch.empty(box.shape, dtype=torch.bool, device=device)
    first = _mixed(_mixed(seed + _STEP) ^ call)
    second = _mixed(first + _STEP)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    dropped_below = int(p * 2.0**64) - (1 << 63)
    kept = torch.empty(box.shape, dtype=torch.bool, device=device)
    for tile in _tiles(box, _TILE_CELLS if device.type == "cpu" else _TILE_CELLS_OF_GPU):
        numbers = _mixed(_mixed(_indices(tile, strides, device) + first) ^ second)
        kept[tile.shifted(box.start).slices] = numbers >= dropped_below
    return kept


def kept_by_torch(box: Box, shape: tuple[int, ...], p: float) -> torch.Tensor:
    """Cells of ``box`` that are kept, as torch's default generator on the CPU draws them.

    The cells of the whole tensor are drawn, in its order, so that all generators advance alike.

    Args:
        box: of the global tensor.
        shape: of the global tensor, in cells.
        p: probability with which a cell is dropped.

    Returns:
        New tensor of bool, of the shape of ``box``.

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
    """Parts of ``box`` with at most so many cells, in the order of its cells."""
    if box.volume <= cells:
        if box.volume:
            yield box
        return
    d = next(d for d, extent in enumerate(box.shape) if extent > 1)
    middle = (box.start[d] + box.stop[d]) // 2
    yield from _tiles(Box(box.start, (*box.stop[:d], middle, *box.stop[d + 1 :])), cells)
    yield from _tiles(Box((*box.start[:d], middle, *box.start[d + 1 :]), box.stop), cells)


def _common(a: Box, b: Box) -> Box:
    """The cells in both."""
    return Box(tuple(map(max, a.start, b.start)), tuple(map(min, a.stop, b.stop)))


def _indices(box: Box, strides: list[int], device: torch.device) -> torch.Tensor:
    """The row-major index in the global tensor of each cell of ``box``."""
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop, stride in zip(box.start, box.stop, strides, strict=True):
        along = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        indices = indices.unsqueeze(-1) + along
    return indices


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """A one-to-one map of 64-bit numbers whose results look independent."""
    z = (z ^ _shifted(z, 30)) * _FACTORS[0]
    z = (z ^ _shifted(z, 27)) * _FACTORS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """``z`` to the right, with zeros on the left whatever its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
