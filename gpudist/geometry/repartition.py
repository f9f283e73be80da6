"""Repartition: movement from the blocks of one decomposition to the blocks of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box, Plan, stage_of
from gpudist.geometry.cartesian import rank_of

RankOf = Callable[[tuple[int, ...]], int]


def overlaps(box: Box, other: Decomposition) -> list[tuple[tuple[int, ...], Box]]:
    """Return index and common cells of each worker of ``other`` that owns cells of ``box``."""
    per_dim = [
        list(blocks.overlapping(start, stop))
        for blocks, start, stop in zip(other.dims, box.start, box.stop, strict=True)
    ]
    return [
        (
            tuple(index for index, _, _ in segments),
            Box(tuple(start for _, start, _ in segments), tuple(stop for _, _, stop in segments)),
        )
        for segments in product(*per_dim)
    ]


def plan_repartition(
    source: Decomposition,
    target: Decomposition,
    rank: int,
    source_index: Sequence[int] | None,
    target_index: Sequence[int] | None,
    source_rank: RankOf,
    target_rank: RankOf,
    key: tuple[object, ...] = (),
) -> Plan:
    """Plan one worker's movement from its block of ``source`` to its block of ``target``.

    Args:
        source, target: two decompositions of the same global shape.
        rank: rank of the worker, in the partition that holds all workers of both.
        source_index, target_index: index of the worker on either grid, ``None`` if it has no block.
        source_rank, target_rank: functions that map an index on either grid to a rank.
        key: further identification of the operator, the same on all ranks.

    Raises:
        ShapeError: on every rank alike, if the global shapes differ.
    """
    if source.shape != target.shape:
        raise ShapeError(
            f"cannot repartition a tensor of global shape {list(source.shape)} into blocks of one "
            f"of shape {list(target.shape)}; both decompositions must have the same global shape"
        )
    owned = source.block(source_index) if source_index is not None else None
    wanted = target.block(target_index) if target_index is not None else None
    gives: list[tuple[int, Box]] = []
    takes: list[tuple[int, Box]] = []
    if owned is not None:
        parts = overlaps(owned, target)
        gives = [(target_rank(index), cells.relative_to(owned.start)) for index, cells in parts]
    if wanted is not None:
        parts = overlaps(wanted, source)
        takes = [(source_rank(index), cells.relative_to(wanted.start)) for index, cells in parts]
    input_shape = owned.shape if owned is not None else None
    output_shape = wanted.shape if wanted is not None else None
    stage = stage_of(rank, input_shape, output_shape, gives, takes)
    return Plan(("repartition", source, target, *key), rank, (stage,))


def plan_all_gather(inputs: Decomposition, axes: Sequence[int], index: Sequence[int]) -> Plan:
    """Plan the all-gather of the worker at ``index``, from its block to all blocks along ``axes``.

    Ranks are row-major on the grid of ``inputs``. The adjoint is a sum-scatter.

    Raises:
        PartitionError: on every rank alike, if one of ``axes`` does not exist.
    """
    grid, index, axes = inputs.grid, tuple(index), sorted(set(axes))
    if axes and not 0 <= axes[0] <= axes[-1] < len(grid):
        raise PartitionError(
            f"axes {axes} must be from 0 to {len(grid) - 1}: the partition has {len(grid)} axes"
        )
    rank = rank_of(index, grid)
    owned = inputs.block(index)
    wanted = Box(
        tuple(0 if d in axes else start for d, start in enumerate(owned.start)),
        tuple(inputs.shape[d] if d in axes else stop for d, stop in enumerate(owned.stop)),
    )
    members = [
        rank_of(member, grid)
        for member in product(*(range(p) if d in axes else (index[d],) for d, p in enumerate(grid)))
    ]
    block = Box.whole(owned.shape)
    gives = [(peer, block) for peer in members if owned.volume]
    takes = [
        (rank_of(member, grid), cells.relative_to(wanted.start))
        for member, cells in overlaps(wanted, inputs)
    ]
    stage = stage_of(rank, owned.shape, wanted.shape, gives, takes, len(members) > 1)
    return Plan(("all_gather", inputs, tuple(axes)), rank, (stage,))
