"""Faces of a block: outputs on one side of it that read ghosts, and how these ghosts are moved.

Along each dim, a worker's outputs are divided into outputs that read ghosts on the left, outputs
that read none, and outputs that read ghosts on the right. A face of a dim lies on one side of that
dim, and inside along all preceding dims, so that every output is in at most one face. A halo
exchange moves the cells that all outputs read, a face those that a part of them reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Message, Move, Plan, Stage
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.halo import Halo, HaloAxis, HaloSegment, Part, all_cells, axes_of, halo_stage
from gpudist.geometry.windows import SlidingWindow, Window

_SIDES: tuple[Part, ...] = ("left", "right")


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


def plan_faces(
    inputs: Decomposition, halo: Halo, index: Sequence[int], with_own: bool = False
) -> tuple[Face, ...]:
    """Plan the faces of the worker at ``index``, in the same number and order on every rank.

    Args:
        inputs, halo, index: see :func:`~gpudist.geometry.halo.plan_halo`.
        with_own: whether slabs also contain own cells.

    Returns:
        The left and the right face of each dim in turn, without those that no worker has.
    """
    axes = axes_of(inputs, halo, index)
    key = ("face", inputs, halo, with_own)
    faces: list[Face] = []
    for d, axis in enumerate(axes):
        for side in _SIDES:
            if any(axis.has(side, worker) for worker in range(axis.inputs.parts)):
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
    axes = axes_of(inputs, halo, (0,) * len(inputs.dims))
    return sum(
        max(sum(axis.has(side, i) for side in _SIDES) for i in range(axis.inputs.parts))
        for axis in axes
    )


def _face(
    axes: Sequence[HaloAxis],
    parts: Sequence[Part],
    grid: tuple[int, ...],
    with_own: bool,
    key: tuple[object, ...],
) -> Face:
    of = list(zip(axes, parts, strict=True))
    rank = rank_of([axis.index for axis in axes], grid)
    moves = all_cells if with_own else _ghosts
    stage = halo_stage([axis.exchanged_segments(part) for axis, part in of], rank, grid, moves)
    outputs = [axis.outputs_of(part, axis.index) for axis, part in of]
    box = Box(tuple(start for start, _ in outputs), tuple(stop for _, stop in outputs))
    origin = [axis.outputs.block(axis.index)[0] for axis in axes]
    starts, stops = zip(*[axis.needed(part, axis.index) for axis, part in of], strict=True)
    owned = [axis.inputs.block(axis.index)[0] for axis in axes]
    reads = Box(starts, stops).relative_to(owned)
    return Face(box.relative_to(origin), Plan(key, rank, (stage,)), reads)


def _ghosts(segments: Sequence[HaloSegment]) -> bool:
    return not all(segment.own for segment in segments)


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
        moves=tuple(Move(m.source.relative_to(strip.start), m.destination) for m in stage.moves),
        sends=tuple(
            Message(send.peer, tuple(box.relative_to(strip.start) for box in send.boxes))
            for send in stage.sends
        ),
    ), strip


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
