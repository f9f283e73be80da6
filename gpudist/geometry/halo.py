"""Halo exchange: one rank's plan, computed from the ranges that every worker needs.

Dims are independent: along each, the range that a worker needs is divided into segments, each owned
by one block. The boxes of a plan are products of such segments, so that planning visits only peers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Move, Plan, Stage, messages_by_peer
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.windows import Window


class Segment(NamedTuple):
    """Cells ``[start, stop)`` of this worker's range, shared with another worker of the axis."""

    worker: int
    start: int
    stop: int


@dataclass(frozen=True)
class AxisHalo:
    """Cells that one worker of an axis owns, needs, receives and sends.

    Attributes:
        owned, needed: ranges of global cells; ``needed`` may reach beyond the edge.
        takes: segments relative to the start of ``needed``.
        gives: segments relative to the start of ``owned``. The cells that A takes from B are listed
            in the same order as those that B gives to A, also if A is B.
    """

    owned: tuple[int, int]
    needed: tuple[int, int]
    takes: tuple[Segment, ...]
    gives: tuple[Segment, ...]


def needed_range(inputs: Blocks, window: Window, index: int) -> tuple[int, int]:
    """Return the range of input cells that worker ``index`` reads; empty if it has no output."""
    start, stop = window.outputs(inputs).block(index)
    first, last = window.needed(start, stop, inputs.extent)
    return (first, first) if start == stop else (first, last)


def reads_own_cells(inputs: Blocks, window: Window) -> bool:
    """Return whether every worker along a dim needs exactly the cells it owns."""
    return all(
        needed_range(inputs, window, index) == inputs.block(index) for index in range(inputs.parts)
    )


def axis_halo(inputs: Blocks, window: Window, periodic: bool, index: int) -> AxisHalo:
    """Return the halo of worker ``index`` along one axis, in time logarithmic in the workers."""
    outputs, extent = window.outputs(inputs), inputs.extent
    owned, needed = inputs.block(index), needed_range(inputs, window, index)
    takes = tuple(
        Segment(owner, start + shift - needed[0], stop + shift - needed[0])
        for shift in shifts(needed, extent, periodic)
        for owner, start, stop in inputs.overlapping(needed[0] - shift, needed[1] - shift)
    )
    if owned[0] == owned[1] or not outputs.occupied:
        return AxisHalo(owned, needed, takes, ())
    reach = (
        reads(outputs, window, extent, 0)[0],
        reads(outputs, window, extent, outputs.occupied - 1)[1],
    )
    gives = tuple(
        Segment(taker, start - shift - owned[0], stop - shift - owned[0])
        for shift in shifts(reach, extent, periodic)
        for taker, start, stop in takers(
            outputs, window, extent, owned[0] + shift, owned[1] + shift
        )
    )
    return AxisHalo(owned, needed, takes, gives)


def plan_halo(
    inputs: Decomposition,
    windows: Sequence[Window],
    index: Sequence[int],
    periodic: Sequence[bool] | None = None,
    nested: bool = False,
) -> Plan:
    """Plan the movement from the block of the worker at ``index`` to all cells its windows read.

    Args:
        inputs: decomposition of the global tensor over the process grid.
        windows: one window per dim; ``HaloWidths()`` for dims that read nothing from others.
        index: index of the worker on the grid.
        periodic: whether ranges beyond the edge wrap to the other end, per dim.
        nested: whether to use one stage per dim with two peers each, which sends corners twice,
            instead of one stage with all peers at once.

    Returns:
        Plan whose ranks are row-major on the grid. Output cells that no block owns are padding.
    """
    periodic = tuple(periodic) if periodic is not None else (False,) * len(inputs.dims)
    axes = [
        axis_halo(blocks, window, wraps, i)
        for blocks, window, wraps, i in zip(inputs.dims, windows, periodic, index, strict=True)
    ]
    grid = inputs.grid
    rank = rank_of(index, grid)
    key = ("halo_exchange", inputs, tuple(windows), periodic, nested)
    if not nested:
        return Plan(key, rank, (_stage(axes, rank, grid),))
    stages: list[Stage] = []
    for current, moving in enumerate(axes):
        if grid[current] == 1 and moving.needed == moving.owned:
            continue
        partial = [
            moving if d == current else _still(axis.needed if d < current else axis.owned, i)
            for d, (axis, i) in enumerate(zip(axes, index, strict=True))
        ]
        stages.append(_stage(partial, rank, grid))
    return Plan(key, rank, tuple(stages) or (_stage(axes, rank, grid),))


def _stage(axes: Sequence[AxisHalo], rank: int, grid: tuple[int, ...]) -> Stage:
    gives = list(_shared([axis.gives for axis in axes], grid))
    takes = list(_shared([axis.takes for axis in axes], grid))
    kept = [box for taker, box in gives if taker == rank]
    sends = messages_by_peer(part for part in gives if part[0] != rank)
    return Stage(
        input_shape=tuple(axis.owned[1] - axis.owned[0] for axis in axes),
        output_shape=tuple(axis.needed[1] - axis.needed[0] for axis in axes),
        moves=tuple(map(Move, kept, [box for owner, box in takes if owner == rank])),
        sends=sends,
        receives=messages_by_peer(part for part in takes if part[0] != rank),
        sources_overlap=bool(sends) or len(kept) > 1,
    )


def _shared(
    segments: Sequence[Sequence[Segment]], grid: tuple[int, ...]
) -> Iterator[tuple[int, Box]]:
    for corner in product(*segments):
        index, start, stop = zip(*corner, strict=True)
        yield rank_of(index, grid), Box(start, stop)


def _still(cells: tuple[int, int], index: int) -> AxisHalo:
    length = cells[1] - cells[0]
    segments = (Segment(index, 0, length),) if length else ()
    return AxisHalo(cells, cells, segments, segments)


def reads(outputs: Blocks, window: Window, extent: int, index: int) -> tuple[int, int]:
    """Return the needed range; it is monotone in ``index``, since empty outputs are not special."""
    return window.needed(*outputs.block(index), extent)


def takers(
    outputs: Blocks, window: Window, extent: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the workers that read cells of ``[start, stop)``, with the overlap."""
    occupied = range(outputs.occupied)
    first = bisect_left(occupied, True, key=lambda i: reads(outputs, window, extent, i)[1] > start)
    last = bisect_left(occupied, True, key=lambda i: reads(outputs, window, extent, i)[0] >= stop)
    for taker in range(first, last):
        block = outputs.block(taker)
        low, high = window.needed(*block, extent)
        low, high = max(low, start), min(high, stop)
        if block[0] < block[1] and low < high:
            yield taker, low, high


def shifts(cells: tuple[int, int], extent: int, periodic: bool) -> range:
    """Return offsets of the copies of the global extent that ``cells`` touch; 0 is the original."""
    if not periodic or extent == 0:
        return range(1)
    return range(cells[0] // extent * extent, cells[1], extent)
