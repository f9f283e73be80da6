"""Random numbers of cells as compositions of torch's operations, in tiles of bounded size.

The native core draws the same uniform numbers, bit by bit, in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import pi, prod

import torch

from gpudist.geometry.boxes import Box, intersection

# A tile of 8 bytes per cell fits in a CPU's cache; a GPU needs more cells for full occupancy.
_TILE_CELLS = 1 << 17
_TILE_CELLS_OF_GPU = 1 << 22
# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def mix_key(seed: torch.Tensor, call: torch.Tensor) -> torch.Tensor:
    """Return the key of the numbers of a seed and a call, all int64."""
    return _mix(_mix(seed + _STEP) ^ call)


def fill_kept(
    kept: torch.Tensor, key: torch.Tensor, box: Box, shape: tuple[int, ...], dropped_below: int
) -> None:
    """Set the bool tensor ``kept`` to whether the number of each cell is not too low."""
    for tile, numbers in _numbers(key, box, shape, kept.device):
        kept[tile.relative_to(box.start).slices] = numbers >= dropped_below


def fill_uniform(drawn: torch.Tensor, key: torch.Tensor, box: Box, shape: tuple[int, ...]) -> None:
    """Fill ``drawn`` with uniform numbers."""
    bits = _BITS[drawn.dtype]
    for tile, numbers in _numbers(key, box, shape, drawn.device):
        steps = _shift_right(numbers, 64 - bits).double() * 2.0**-bits
        drawn[tile.relative_to(box.start).slices] = steps.to(drawn.dtype)


def fill_normal(drawn: torch.Tensor, key: torch.Tensor, box: Box, shape: tuple[int, ...]) -> None:
    """Fill ``drawn`` with standard normal numbers.

    The native core's differ from these in the last bits, because torch's logarithm and cosine
    depend on the machine.

    Source:
        Box & Muller 1958, from two uniform numbers per cell.
    """
    for tile, numbers in _numbers(key, box, shape, drawn.device):
        # The number must be above 0, so that the logarithm is finite.
        radius = (_shift_right(numbers, 11) + 1).double() * 2.0**-53
        turn = _shift_right(_mix(numbers + _STEP), 11).double() * 2.0**-53
        cells = (-2 * radius.log()).sqrt() * (2 * pi * turn).cos()
        drawn[tile.relative_to(box.start).slices] = cells.to(drawn.dtype)


def _numbers(
    key: torch.Tensor, box: Box, shape: tuple[int, ...], device: torch.device
) -> Iterator[tuple[Box, torch.Tensor]]:
    second = _mix(key + _STEP)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    for tile in _tiles(box, _TILE_CELLS if device.type == "cpu" else _TILE_CELLS_OF_GPU):
        yield tile, _mix(_mix(_indices(tile, strides, device) + key) ^ second)


def draw_kept_by_torch(box: Box, shape: tuple[int, ...], p: float) -> torch.Tensor:
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
        common = intersection(tile, box)
        if common is not None:
            cells = drawn[common.relative_to(tile.start).slices]
            kept[common.relative_to(box.start).slices] = cells
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


def _indices(box: Box, strides: list[int], device: torch.device) -> torch.Tensor:
    indices = torch.zeros((), dtype=torch.int64, device=device)
    for start, stop, stride in zip(box.start, box.stop, strides, strict=True):
        along = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        indices = indices.unsqueeze(-1) + along
    return indices


def _mix(z: torch.Tensor) -> torch.Tensor:
    # A bijection of 64-bit numbers whose results look independent.
    z = (z ^ _shift_right(z, 30)) * _FACTORS[0]
    z = (z ^ _shift_right(z, 27)) * _FACTORS[1]
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    # A logical shift: ``>>`` would repeat the sign bit.
    return (z >> bits) & ((1 << (64 - bits)) - 1)
