"""Halo exchange and its faces: one rank's plan, from the ranges that every worker needs.

Dims are independent: along each, the range that a worker needs is divided into segments, each owned
by one block. The boxes of a plan are products of such segments, so that planning visits only peers.

Along each dim, a worker's outputs are divided into outputs that read ghosts on the left, outputs
that read none, and outputs that read ghosts on the right. A face of a dim lies on one side of that
dim, and inside along all preceding dims, so that every output is in at most one face. A halo
exchange moves the cells that all outputs read, a face those that a part of them reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Message, Move, Plan, Stage, stage_of
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.windows import HaloWidths, SlidingWindow, Window

Part = Literal["left", "inside", "right", "whole"]
_SIDES: tuple[Part, ...] = ("left", "right")


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


@dataclass(frozen=True)
class Face:
    """Outputs on one side of a block, and the movement of the ghosts they read.

    Attributes:
        outputs: box in coordinates of the worker's output block; empty if it has no such face.
        plan: plan from the worker's block to a slab of all cells that ``outputs`` read. Nothing is
            moved to padding; own cells are omitted unless ``with_own`` is set.
        reads: cells of the slab in coordinates of the worker's block.
    """

    outputs: Box
    plan: Plan
    reads: Box


class _HaloSegment(NamedTuple):
    """Cells ``[start, stop)`` of this worker's range, shared with another worker of the axis.

    ``own`` if the worker owns them without wrapping.
    """

    worker: int
    start: int
    stop: int
    own: bool


# Whether cells are moved that lie in one segment along each dim.
_Moves = Callable[[Sequence[_HaloSegment]], bool]


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
    takes: Sequence[_HaloSegment]
    gives: Sequence[_HaloSegment]


@dataclass(frozen=True)
class _Axis:
    """One dim of the tensor as seen by the worker at ``index``."""

    inputs: Blocks
    outputs: Blocks
    window: Window
    periodic: bool
    index: int

    def outputs_of(self, part: Part, index: int) -> tuple[int, int]:
        """Return the range of outputs of worker ``index`` of this axis that lie in ``part``."""
        start, stop = self.outputs.block(index)
        if part == "whole":
            return start, stop
        first, last = inside(self.inputs, self.outputs, self.window, self.periodic, index)
        return {"left": (start, first), "inside": (first, last), "right": (last, stop)}[part]

    def has(self, side: Part, index: int) -> bool:
        """Return whether worker ``index`` of this axis has outputs that read ghosts there."""
        start, stop = self.outputs_of(side, index)
        return start < stop

    def faces(self, index: int) -> int:
        """Return on how many sides worker ``index`` of this axis has outputs that read ghosts."""
        return sum(self.has(side, index) for side in _SIDES)

    def needed(self, part: Part, index: int) -> tuple[int, int]:
        """Return the range of cells that the outputs in ``part`` read."""
        start, stop = self.outputs_of(part, index)
        low, high = self.window.needed(start, stop, self.inputs.extent)
        return (low, high) if start < stop else (low, low)

    def shared(self, part: Part) -> _Shared:
        """Return the cells that outputs in ``part`` read, in time logarithmic in the workers."""
        owned, needed = self.inputs.block(self.index), self.needed(part, self.index)
        return _Shared(owned, needed, list(self._takes(part)), list(self._gives(part)))

    def _takes(self, part: Part) -> Iterator[_HaloSegment]:
        low, high = self.needed(part, self.index)
        for shift in shifts((low, high), self.inputs.extent, self.periodic):
            for owner, start, stop in self.inputs.overlapping(low - shift, high - shift):
                own = owner == self.index and shift == 0
                yield _HaloSegment(owner, start + shift - low, stop + shift - low, own)

    def _gives(self, part: Part) -> Iterator[_HaloSegment]:
        first, last = self.inputs.block(self.index)
        outputs, window, extent = self.outputs, self.window, self.inputs.extent
        if first == last or not outputs.occupied:
            return
        reach = (
            reads(outputs, window, extent, 0)[0],
            reads(outputs, window, extent, outputs.occupied - 1)[1],
        )
        for shift in shifts(reach, extent, self.periodic):
            for taker, low, high in takers(outputs, window, extent, first + shift, last + shift):
                if part != "whole":
                    needed = self.needed(part, taker)
                    low, high = max(low, needed[0]), min(high, needed[1])
                if low < high:
                    own = taker == self.index and shift == 0
                    yield _HaloSegment(taker, low - shift - first, high - shift - first, own)


@lru_cache(maxsize=4096)
def inside(
    inputs: Blocks, outputs: Blocks, window: Window, periodic: bool, index: int
) -> tuple[int, int]:
    """Return the range of outputs of worker ``index`` that read no ghosts.

    Outputs before the range read ghosts on the left; outputs behind it read them only on the right.
    """
    owned, (start, stop) = inputs.block(index), outputs.block(index)

    def reads_from(output: int) -> int:
        low = window.needed(output, output + 1, inputs.extent)[0]
        return low if periodic else max(low, 0)

    def reads_to(output: int) -> int:
        high = window.needed(output, output + 1, inputs.extent)[1]
        return high if periodic else min(high, inputs.extent)

    first = bisect_left(range(stop), True, start, key=lambda i: reads_from(i) >= owned[0])
    last = bisect_left(range(stop), True, first, key=lambda i: reads_to(i) > owned[1])
    return first, last


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


def covers_own_cells(inputs: Blocks, window: Window) -> bool:
    """Return whether every worker along a dim owns cells, and needs at least these."""
    for index in range(inputs.parts):
        (start, stop), (first, last) = inputs.block(index), needed_range(inputs, window, index)
        if not first <= start < stop <= last:
            return False
    return True


def adjoint_in_place(stage: Stage, own: Box) -> Stage:
    """Return the adjoint of a halo exchange that adds ghosts to the cells of the same tensor.

    Args:
        stage: exchange from a block to the block with its ghosts.
        own: the block's cells in the latter.
    """
    origin = [-n for n in own.start]
    moves = [Move(move.destination, move.source.shifted(origin)) for move in stage.moves]
    return Stage(
        stage.output_shape,
        stage.output_shape,
        tuple(move for move in moves if move.source != move.destination),
        stage.receives,
        tuple(
            Message(send.peer, tuple(box.shifted(origin) for box in send.boxes))
            for send in stage.sends
        ),
        sources_overlap=True,
        destinations_overlap=True,
    )


def from_strip(stage: Stage) -> tuple[Stage, Box]:
    """Return a stage whose input is the smallest box of all cells that it moves, and that box."""
    boxes = [box for send in stage.sends for box in send.boxes]
    boxes += [move.source for move in stage.moves]
    none = (0,) * len(stage.input_shape or ())
    strip = Box(none, none)
    if boxes:
        starts, stops = [box.start for box in boxes], [box.stop for box in boxes]
        strip = Box(
            tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True)))
        )
    return replace(
        stage,
        input_shape=strip.shape,
        moves=tuple(Move(m.source.shifted(strip.start), m.destination) for m in stage.moves),
        sends=tuple(
            Message(send.peer, tuple(box.shifted(strip.start) for box in send.boxes))
            for send in stage.sends
        ),
    ), strip


def plan_halo(inputs: Decomposition, halo: Halo, index: Sequence[int]) -> Plan:
    """Plan the movement from the block of the worker at ``index`` to all cells its windows read.

    Args:
        inputs: decomposition of the global tensor over the process grid.
        halo: windows per dim of ``inputs``, and how ghosts are moved.
        index: index of the worker on the grid.

    Returns:
        Plan whose ranks are row-major on the grid. Output cells that no block owns are padding.
    """
    axes = [axis.shared("whole") for axis in _axes(inputs, halo, index)]
    grid = inputs.grid
    rank = rank_of(index, grid)
    key = ("halo_exchange", inputs, halo)
    if not halo.nested:
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


def plan_faces(
    inputs: Decomposition, halo: Halo, index: Sequence[int], with_own: bool = False
) -> tuple[Face, ...]:
    """Plan the faces of the worker at ``index``, in the same number and order on every rank.

    Args:
        inputs, halo, index: see :func:`plan_halo`.
        with_own: whether slabs also contain own cells.

    Returns:
        The left and the right face of each dim in turn, without those that no worker has.
    """
    axes = _axes(inputs, halo, index)
    key = ("face", inputs, halo, with_own)
    faces: list[Face] = []
    for d, axis in enumerate(axes):
        for side in _SIDES:
            if _anybody_has(axis, side):
                before: tuple[Part, ...] = ("inside",) * d
                behind: tuple[Part, ...] = ("whole",) * (len(axes) - d - 1)
                parts = (*before, side, *behind)
                faces.append(_face(axes, parts, inputs.grid, with_own, (*key, d, side)))
    return tuple(faces)


def have_faces(inputs: Decomposition, halo: Halo) -> bool:
    """Return whether any worker reads ghosts, so that :func:`plan_faces` returns a face."""
    return most_faces(inputs, halo) > 0


def most_faces(inputs: Decomposition, halo: Halo) -> int:
    """Return the number of faces with outputs that a worker has at most."""
    axes = _axes(inputs, halo, (0,) * len(inputs.dims))
    return sum(max(map(axis.faces, range(axis.inputs.parts))) for axis in axes)


def _axes(inputs: Decomposition, halo: Halo, index: Sequence[int]) -> list[_Axis]:
    along = zip(inputs.dims, halo.windows, halo.periodic, index, strict=True)
    return [
        _Axis(blocks, window.outputs(blocks), window, wraps, i)
        for blocks, window, wraps, i in along
    ]


def _anybody_has(axis: _Axis, side: Part) -> bool:
    return any(axis.has(side, worker) for worker in range(axis.inputs.parts))


def _face(
    axes: Sequence[_Axis],
    parts: Sequence[Part],
    grid: tuple[int, ...],
    with_own: bool,
    key: tuple[object, ...],
) -> Face:
    of = list(zip(axes, parts, strict=True))
    rank = rank_of([axis.index for axis in axes], grid)
    moves = _all_cells if with_own else _ghosts
    stage = _stage([axis.shared(part) for axis, part in of], rank, grid, moves)
    outputs = [axis.outputs_of(part, axis.index) for axis, part in of]
    box = Box(tuple(start for start, _ in outputs), tuple(stop for _, stop in outputs))
    origin = [axis.outputs.block(axis.index)[0] for axis in axes]
    starts, stops = zip(*[axis.needed(part, axis.index) for axis, part in of], strict=True)
    owned = [axis.inputs.block(axis.index)[0] for axis in axes]
    reads = Box(starts, stops).shifted(owned)
    return Face(box.shifted(origin), Plan(key, rank, (stage,)), reads)


def _all_cells(_: Sequence[_HaloSegment]) -> bool:
    return True


def _ghosts(segments: Sequence[_HaloSegment]) -> bool:
    return not all(segment.own for segment in segments)


def _stage(
    axes: Sequence[_Shared], rank: int, grid: tuple[int, ...], moves: _Moves = _all_cells
) -> Stage:
    gives = list(_boxes([axis.gives for axis in axes], grid, moves))
    return stage_of(
        rank,
        tuple(axis.owned[1] - axis.owned[0] for axis in axes),
        tuple(axis.needed[1] - axis.needed[0] for axis in axes),
        gives,
        list(_boxes([axis.takes for axis in axes], grid, moves)),
        sources_overlap=len(gives) > 1 or any(peer != rank for peer, _ in gives),
    )


def _boxes(
    segments: Sequence[Sequence[_HaloSegment]], grid: tuple[int, ...], moves: _Moves
) -> Iterator[tuple[int, Box]]:
    for corner in filter(moves, product(*segments)):
        index, start, stop, _ = zip(*corner, strict=True)
        yield rank_of(index, grid), Box(start, stop)


def _still(cells: tuple[int, int], index: int) -> _Shared:
    length = cells[1] - cells[0]
    segments = [_HaloSegment(index, 0, length, True)] if length else []
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


def own_paddings(
    inputs: Decomposition, windows: Sequence[Window], index: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the symmetric zero padding for a block's outputs without ghosts.

    The result is one number per dim with a sliding window. It is ``None``, on every rank alike, if
    any worker would need different padding on its two sides, would have to drop own cells, or has
    outputs but no cells. The time is proportional to the number of workers along each axis.
    """
    own: list[int] = []
    for blocks, window, i in zip(inputs.dims, windows, index, strict=True):
        if not isinstance(window, SlidingWindow):
            continue
        paddings = axis_paddings(blocks, window)
        if paddings is None:
            return None
        own.append(paddings[i])
    return tuple(own)


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
        own = replace(window, padding=(padding, padding)) if fits else window
        if not fits or own.output_extent(owned[1] - owned[0]) != stop - start:
            return None
        paddings.append(padding)
    return tuple(paddings)
