"""Halo exchange: one rank's plan, from the ranges that every worker needs.

Dims are independent: along each, the range that a worker needs is divided into segments, each owned
by one block. The boxes of a plan are products of such segments, so that planning visits only peers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Message, Move, Plan, Stage, stage_of
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.windows import HaloWidths, SlidingWindow, Window


@dataclass(frozen=True)
class Halo:
    """Options of a halo exchange that decide its plan, the same on all ranks.

    Attributes:
        windows: one window per dim; ``HaloWidths()`` for dims that read nothing from others.
        periodic: whether ranges beyond the edge wrap to the other end, per dim; none if it is
            empty.
        nested: whether to use one stage per dim with two peers each, which sends corners twice,
            instead of one stage with all peers at once. ``None`` is a choice still to be made.
    """

    windows: tuple[Window, ...]
    periodic: tuple[bool, ...] = ()
    nested: bool | None = False

    def __post_init__(self) -> None:
        if not self.periodic:
            object.__setattr__(self, "periodic", (False,) * len(self.windows))

    def over(self, dims: int) -> Halo:
        """Return the halo of a tensor with ``dims`` dims, of which this one has the last."""
        leading = dims - len(self.windows)
        windows, periodic = (HaloWidths(),) * leading, (False,) * leading
        return replace(self, windows=windows + self.windows, periodic=periodic + self.periodic)


def halo_of(
    name: str,
    dims: int,
    window: Sequence[Window] | None,
    halo: Sequence[tuple[int, int]] | None,
    periodic: Sequence[bool] | bool,
    nested: bool | None,
) -> Halo:
    """Return the halo of a tensor with ``dims`` dims from the arguments of ``name``.

    Args:
        name: operator, for errors.
        dims: number of axes of the partition.
        window, halo, periodic, nested: see :func:`gpudist.halo_exchange`.
    """
    if window is None and halo is None:
        raise ShapeError(
            f"{name}: neither window nor halo is given; pass the window of the kernel, or the "
            "widths, such as halo=[(1, 1)] for one cell on both sides of the last dim"
        )
    if window is not None and halo is not None:
        raise ShapeError(f"{name}: window and halo are both given; pass only one")
    windows = tuple(() if window is None else window)
    windows += tuple(HaloWidths(*widths) for widths in (() if halo is None else halo))
    if len(windows) > dims:
        raise PartitionError(
            f"{name}: {len(windows)} windows for a partition with {dims} axes; pass one window per "
            "dim, counted from the last"
        )
    is_one = not isinstance(periodic, Iterable)
    wraps = [periodic] * len(windows) if is_one else list(periodic)
    if len(wraps) != len(windows):
        raise ShapeError(f"{name}: periodic has {len(wraps)} entries for {len(windows)} dims")
    return Halo(windows, tuple(map(bool, wraps)), nested).over(dims)


class HaloSegment(NamedTuple):
    """Cells ``[start, stop)`` of this worker's range, shared with another worker of the axis."""

    worker: int
    start: int
    stop: int


class _Shared(NamedTuple):
    """Cells that one worker of an axis owns, needs, receives and sends.

    Attributes:
        owned, needed: ranges of global cells; ``needed`` may reach beyond the edge.
        takes: segments relative to the start of ``needed``.
        gives: segments relative to the start of ``owned``. The cells that A takes from B are listed
            in the same order as those that B gives to A, also if A is B.
    """

    owned: tuple[int, int]
    needed: tuple[int, int]
    takes: Sequence[HaloSegment]
    gives: Sequence[HaloSegment]


@dataclass(frozen=True)
class HaloAxis:
    """One dim of the tensor as seen by the worker at ``index``."""

    inputs: Blocks
    window: Window
    periodic: bool
    index: int

    def exchanged_segments(self) -> _Shared:
        """Return the cells that the outputs read, in time logarithmic in the workers."""
        owned = self.inputs.block(self.index)
        needed = needed_range(self.inputs, self.window, self.index)
        return _Shared(owned, needed, list(self._takes(*needed)), list(self._gives(*owned)))

    def _takes(self, low: int, high: int) -> Iterator[HaloSegment]:
        for shift in shifts((low, high), self.inputs.extent, self.periodic):
            for owner, start, stop in self.inputs.overlapping(low - shift, high - shift):
                yield HaloSegment(owner, start + shift - low, stop + shift - low)

    def _gives(self, first: int, last: int) -> Iterator[HaloSegment]:
        window, extent, outputs = self.window, self.inputs.extent, self.window.outputs(self.inputs)
        if first == last or not outputs.occupied:
            return
        reach = (
            reads(outputs, window, extent, 0)[0],
            reads(outputs, window, extent, outputs.occupied - 1)[1],
        )
        for shift in shifts(reach, extent, self.periodic):
            for taker, low, high in takers(outputs, window, extent, first + shift, last + shift):
                yield HaloSegment(taker, low - shift - first, high - shift - first)


def needed_range(inputs: Blocks, window: Window, index: int) -> tuple[int, int]:
    """Return the range of input cells that worker ``index`` reads; empty if it has no output."""
    start, stop = window.outputs(inputs).block(index)
    first, last = window.needed(start, stop, inputs.extent)
    return (first, first) if start == stop else (first, last)


def owns_what_it_reads(inputs: Blocks, window: Window) -> bool:
    """Return whether every worker along a dim owns all cells that it needs."""
    for index in range(inputs.parts):
        (first, last), (start, stop) = inputs.block(index), needed_range(inputs, window, index)
        if start < stop and not (first <= start and stop <= last):
            return False
    return True


def reads_own_cells(inputs: Blocks, window: Window) -> bool:
    """Return whether every worker along a dim needs exactly the cells it owns."""
    return all(
        needed_range(inputs, window, index) == inputs.block(index) for index in range(inputs.parts)
    )


def covers_own_cells(inputs: Blocks, window: Window) -> bool:
    """Return whether every worker along a dim owns cells, and needs at least these."""
    for index in range(inputs.parts):
        (start, stop), (first, last) = inputs.block(index), needed_range(inputs, window, index)
        if not first <= start < stop <= last:
            return False
    return True


def own_paddings(
    inputs: Decomposition, windows: Sequence[Window], index: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the symmetric zero padding for a block's outputs without ghosts.

    The result is one number per dim with a sliding window. It is ``None``, on every rank alike, if
    any worker would need different padding on its two sides, would have to drop own cells, or has
    outputs but no cells. The time is proportional to the number of workers along each axis.
    """
    own_widths: list[int] = []
    for blocks, window, i in zip(inputs.dims, windows, index, strict=True):
        if not isinstance(window, SlidingWindow):
            continue
        paddings = axis_paddings(blocks, window)
        if paddings is None:
            return None
        own_widths.append(paddings[i])
    return tuple(own_widths)


@lru_cache(maxsize=256)
def axis_paddings(inputs: Blocks, window: SlidingWindow) -> tuple[int, ...] | None:
    """Return the padding of :func:`own_paddings` for every worker of one axis."""
    outputs = window.outputs(inputs)
    paddings: list[int] = []
    for index in range(inputs.parts):
        owned, (start, stop) = inputs.block(index), outputs.block(index)
        if start == stop:
            paddings.append(0)
            continue
        padding = owned[0] - window.needed(start, stop, inputs.extent)[0]
        padded = owned[1] - owned[0] + 2 * padding
        fits = owned[0] < owned[1] and padding >= 0 and padded >= window.reach
        own_window = replace(window, padding=(padding, padding)) if fits else window
        if not fits or own_window.output_extent(owned[1] - owned[0]) != stop - start:
            return None
        paddings.append(padding)
    return tuple(paddings)


def adjoint_in_place(stage: Stage, own: Box) -> Stage:
    """Return the adjoint of a halo exchange that adds ghosts to the cells of the same tensor.

    Args:
        stage: exchange from a block to the block with its ghosts.
        own: the block's cells in the latter.
    """
    origin = [-n for n in own.start]
    moves = [Move(move.destination, move.source.relative_to(origin)) for move in stage.moves]
    return Stage(
        stage.output_shape,
        stage.output_shape,
        tuple(move for move in moves if move.source != move.destination),
        stage.receives,
        tuple(
            Message(send.peer, tuple(box.relative_to(origin) for box in send.boxes))
            for send in stage.sends
        ),
        sources_overlap=True,
        destinations_overlap=True,
    )


def plan_halo(inputs: Decomposition, halo: Halo, index: Sequence[int]) -> Plan:
    """Plan the movement from the block of the worker at ``index`` to all cells its windows read.

    Args:
        inputs: decomposition of the global tensor over the process grid.
        halo: windows per dim of ``inputs``, and how ghosts are moved.
        index: index of the worker on the grid.

    Returns:
        Plan whose ranks are row-major on the grid. Output cells that no block owns are padding.
    """
    along = zip(inputs.dims, halo.windows, halo.periodic, index, strict=True)
    axes = [HaloAxis(*of_axis).exchanged_segments() for of_axis in along]
    grid = inputs.grid
    rank = rank_of(index, grid)
    key = ("halo_exchange", inputs, halo)
    if not halo.nested:
        return Plan(key, rank, (halo_stage(axes, rank, grid),))
    stages: list[Stage] = []
    for current, moving in enumerate(axes):
        if grid[current] == 1 and moving.needed == moving.owned:
            continue
        partial = [
            moving if d == current else _still(axis.needed if d < current else axis.owned, i)
            for d, (axis, i) in enumerate(zip(axes, index, strict=True))
        ]
        stages.append(halo_stage(partial, rank, grid))
    return Plan(key, rank, tuple(stages) or (halo_stage(axes, rank, grid),))


def halo_stage(axes: Sequence[_Shared], rank: int, grid: tuple[int, ...]) -> Stage:
    gives = list(_boxes([axis.gives for axis in axes], grid))
    return stage_of(
        rank,
        tuple(axis.owned[1] - axis.owned[0] for axis in axes),
        tuple(axis.needed[1] - axis.needed[0] for axis in axes),
        gives,
        list(_boxes([axis.takes for axis in axes], grid)),
        sources_overlap=len(gives) > 1 or any(peer != rank for peer, _ in gives),
    )


def _boxes(
    segments: Sequence[Sequence[HaloSegment]], grid: tuple[int, ...]
) -> Iterator[tuple[int, Box]]:
    for corner in product(*segments):
        index, start, stop = zip(*corner, strict=True)
        yield rank_of(index, grid), Box(start, stop)


def _still(cells: tuple[int, int], index: int) -> _Shared:
    length = cells[1] - cells[0]
    segments = [HaloSegment(index, 0, length)] if length else []
    return _Shared(cells, cells, segments, segments)


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
