"""Copies within a worker: the block that consists of copies of another block's cells.

Along each dim, cells are copied in runs of neighbours, so that the boxes of a plan are products of
runs, as those of padding by reflected or repeated cells, of flips and of shifts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from gpudist.geometry.boxes import Box, Move, Plan, Stage

# The boxes of a cube padded by 3 cells on five sides are 7 x 7 x 4.
MOST_BOXES = 256


class Run(NamedTuple):
    """Neighbouring cells from ``source`` on, copied to cells from ``destination`` on."""

    source: int
    destination: int
    length: int


def runs_of(cells: Sequence[int]) -> list[Run]:
    """Return the runs by which each cell ``i`` becomes a copy of cell ``cells[i]``."""
    starts = [i for i, cell in enumerate(cells) if i == 0 or cell != cells[i - 1] + 1]
    stops = [*starts[1:], len(cells)]
    return [Run(cells[i], i, stop - i) for i, stop in zip(starts, stops, strict=False)]


def plan_copies(
    shape: Sequence[int], runs: Mapping[int, Sequence[Run]], rank: int, most_boxes: int = MOST_BOXES
) -> Plan:
    """Plan copies within the worker ``rank``, which exchanges nothing.

    Args:
        shape: shape of the worker's block.
        runs: runs along each dim that is not copied as it is; at least one dim.
        rank: rank of the worker in the partition that the plan is bound to.
        most_boxes: number of boxes up to which several dims are copied in one stage.

    Returns:
        Plan of one stage, or of several ones, each for some of the dims.
    """
    stages: list[Stage] = []
    together: dict[int, Sequence[Run]] = {}
    for dim, along in runs.items():
        if together and prod(map(len, together.values())) * len(along) > most_boxes:
            stages.append(_stage(shape, together))
            shape, together = stages[-1].output_shape or (), {}
        together[dim] = along
    stages.append(_stage(shape, together))
    return Plan(("copies", *stages), rank, tuple(stages))


def _stage(shape: Sequence[int], runs: Mapping[int, Sequence[Run]]) -> Stage:
    along = [runs.get(dim, (Run(0, 0, extent),)) for dim, extent in enumerate(shape)]
    moves = [
        Move(
            Box(tuple(r.source for r in box), tuple(r.source + r.length for r in box)),
            Box(tuple(r.destination for r in box), tuple(r.destination + r.length for r in box)),
        )
        for box in product(*along)
    ]
    return Stage(
        tuple(shape),
        tuple(sum(run.length for run in dim) for dim in along),
        tuple(moves),
        sources_overlap=any(map(_overlap, runs.values())),
    )


def _overlap(runs: Sequence[Run]) -> bool:
    ordered = sorted(runs)
    return any(a.source + a.length > b.source for a, b in pairwise(ordered))
