"""Faces: the outputs of a worker that read ghost cells.

Along each dim, a worker's outputs are divided into outputs that read ghosts on the left, outputs
that read none, and outputs that read ghosts on the right. A face of a dim lies on one side of that
dim, and inside along all preceding dims, so that every output is in at most one face.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Move, Plan, Stage, messages_by_peer
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.halo import reads, shifts, takers
from gpudist.geometry.windows import SlidingWindow, Window

Part = Literal["left", "inside", "right", "whole"]
_SIDES: tuple[Part, ...] = ("left", "right")


@dataclass(frozen=True)
class Face:
    """Outputs on one side of a block, and the movement of the ghosts they read.

    Attributes:
        outputs: box in coordinates of the worker's output block; empty if it has no such face.
        plan: plan from the worker's block to a slab of all cells that ``outputs`` read. Nothing is
            moved to padding; own cells are omitted unless ``with_own`` is set.
    """

    outputs: Box
    plan: Plan


class _Segment(NamedTuple):
    """Cells ``[start, stop)`` of a range; ``own`` if the worker owns them without wrapping."""

    worker: int
    start: int
    stop: int
    own: bool


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

    def needed(self, part: Part, index: int) -> tuple[int, int]:
        """Return the range of cells that the outputs in ``part`` read."""
        start, stop = self.outputs_of(part, index)
        low, high = self.window.needed(start, stop, self.inputs.extent)
        return (low, high) if start < stop else (low, low)

    def takes(self, part: Part) -> Iterator[_Segment]:
        """Return the segments that ``part`` needs, by owner, relative to the needed range."""
        low, high = self.needed(part, self.index)
        for shift in shifts((low, high), self.inputs.extent, self.periodic):
            for owner, start, stop in self.inputs.overlapping(low - shift, high - shift):
                own = owner == self.index and shift == 0
                yield _Segment(owner, start + shift - low, stop + shift - low, own)

    def gives(self, part: Part) -> Iterator[_Segment]:
        """Return the own cells that ``part`` of another worker needs, relative to the block."""
        first, last = self.inputs.block(self.index)
        outputs, window, extent = self.outputs, self.window, self.inputs.extent
        if first == last or not outputs.occupied:
            return
        reach = (
            reads(outputs, window, extent, 0)[0],
            reads(outputs, window, extent, outputs.occupied - 1)[1],
        )
        for shift in shifts(reach, extent, self.periodic):
            for taker, start, stop in takers(outputs, window, extent, first + shift, last + shift):
                low, high = self.needed(part, taker)
                low, high = max(low, start), min(high, stop)
                if low < high:
                    own = taker == self.index and shift == 0
                    yield _Segment(taker, low - shift - first, high - shift - first, own)


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


def plan_faces(
    inputs: Decomposition,
    windows: Sequence[Window],
    index: Sequence[int],
    periodic: Sequence[bool] | None = None,
    with_own: bool = False,
) -> tuple[Face, ...]:
    """Plan the faces of the worker at ``index``, in the same number and order on every rank.

    Args:
        inputs: decomposition of the global tensor over the process grid.
        windows: one window per dim; ``HaloWidths()`` for dims that read nothing from others.
        index: index of the worker on the grid.
        periodic: whether ranges beyond the edge wrap to the other end, per dim.
        with_own: whether slabs also contain own cells.

    Returns:
        The left and the right face of each dim in turn, without those that no worker has.
    """
    periodic = tuple(periodic) if periodic is not None else (False,) * len(inputs.dims)
    axes = _axes(inputs, windows, index, periodic)
    key = ("face", inputs, tuple(windows), periodic, with_own)
    faces: list[Face] = []
    for d, axis in enumerate(axes):
        for side in _SIDES:
            if _anybody_has(axis, side):
                before: tuple[Part, ...] = ("inside",) * d
                behind: tuple[Part, ...] = ("whole",) * (len(axes) - d - 1)
                parts = (*before, side, *behind)
                faces.append(_face(axes, parts, inputs.grid, with_own, (*key, d, side)))
    return tuple(faces)


def have_faces(inputs: Decomposition, windows: Sequence[Window], periodic: Sequence[bool]) -> bool:
    """Return whether any worker reads ghosts, so that :func:`plan_faces` returns a face."""
    axes = _axes(inputs, windows, (0,) * len(inputs.dims), periodic)
    return any(_anybody_has(axis, side) for axis in axes for side in _SIDES)


def _axes(
    inputs: Decomposition,
    windows: Sequence[Window],
    index: Sequence[int],
    periodic: Sequence[bool],
) -> list[_Axis]:
    return [
        _Axis(blocks, window.outputs(blocks), window, wraps, i)
        for blocks, window, wraps, i in zip(inputs.dims, windows, periodic, index, strict=True)
    ]


def _anybody_has(axis: _Axis, side: Part) -> bool:
    ranges = (axis.outputs_of(side, worker) for worker in range(axis.inputs.parts))
    return any(start < stop for start, stop in ranges)


def _face(
    axes: Sequence[_Axis],
    parts: Sequence[Part],
    grid: tuple[int, ...],
    with_own: bool,
    key: tuple[object, ...],
) -> Face:
    of = list(zip(axes, parts, strict=True))
    rank = rank_of([axis.index for axis in axes], grid)
    gives = list(_shared([list(axis.gives(part)) for axis, part in of], grid, with_own))
    takes = list(_shared([list(axis.takes(part)) for axis, part in of], grid, with_own))
    kept = [box for taker, box in gives if taker == rank]
    sends = messages_by_peer(part for part in gives if part[0] != rank)
    owned = [axis.inputs.block(axis.index) for axis in axes]
    needed = [axis.needed(part, axis.index) for axis, part in of]
    stage = Stage(
        input_shape=tuple(stop - start for start, stop in owned),
        output_shape=tuple(stop - start for start, stop in needed),
        moves=tuple(map(Move, kept, [box for owner, box in takes if owner == rank])),
        sends=sends,
        receives=messages_by_peer(part for part in takes if part[0] != rank),
        sources_overlap=bool(sends) or len(kept) > 1,
    )
    outputs = [axis.outputs_of(part, axis.index) for axis, part in of]
    box = Box(tuple(start for start, _ in outputs), tuple(stop for _, stop in outputs))
    origin = [axis.outputs.block(axis.index)[0] for axis in axes]
    return Face(box.shifted(origin), Plan(key, rank, (stage,)))


def _shared(
    segments: Sequence[Sequence[_Segment]], grid: tuple[int, ...], with_own: bool
) -> Iterator[tuple[int, Box]]:
    for corner in product(*segments):
        if with_own or not all(segment.own for segment in corner):
            index, start, stop, _ = zip(*corner, strict=True)
            yield rank_of(index, grid), Box(start, stop)


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
