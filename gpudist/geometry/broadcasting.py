"""Broadcasting between partitions: match workers of P_x with workers of P_y."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from gpudist.errors import PartitionError
from gpudist.geometry.boxes import Box, Collective, Message, Move, Plan, Stage
from gpudist.geometry.cartesian import (
    column_major_index,
    column_major_number,
    index_of,
    pad_left,
    rank_of,
)


@dataclass(frozen=True)
class Pairing:
    """Match between the workers of a source grid and those of a target grid.

    Workers match if they have the same number over the axes where both effective shapes are equal.
    A transposed grid is numbered column-major over its reversed index, any other grid row-major.

    Attributes:
        source, target: grid shapes. The source is left-padded with ones; each of its axes must
            then equal the target's or be 1.
        transpose_source, transpose_target: whether to reverse that grid's shape and index first.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    transpose_source: bool = False
    transpose_target: bool = False

    def __post_init__(self) -> None:
        problem = misfit(self.source, self.target, self.transpose_source, self.transpose_target)
        if problem is not None:
            raise PartitionError(
                f"a partition of shape {format_grid(self.source, self.transpose_source)} does not "
                f"broadcast to one of shape {format_grid(self.target, self.transpose_target)}: "
                f"{problem}"
            )

    @cached_property
    def _target_shape(self) -> tuple[int, ...]:
        return _effective(self.target, self.transpose_target)

    @cached_property
    def _source_shape(self) -> tuple[int, ...]:
        shape = _effective(self.source, self.transpose_source)
        return pad_left(shape, len(self._target_shape), 1)

    @cached_property
    def _matching(self) -> tuple[int, ...]:
        pairs = zip(self._source_shape, self._target_shape, strict=True)
        return tuple(axis for axis, (a, b) in enumerate(pairs) if a == b)

    @cached_property
    def _matching_shape(self) -> tuple[int, ...]:
        return tuple(self._target_shape[axis] for axis in self._matching)

    def source_of(self, target_rank: int) -> int:
        """Return the source rank that matches the worker ``target_rank`` of the target grid."""
        index = index_of(target_rank, self.target)
        if self.transpose_target:
            index = index[::-1]
        number = self._number(index, self.transpose_target)
        matched = self._index(number, self.transpose_source)
        effective = [0] * len(self._source_shape)
        for axis, i in zip(self._matching, matched, strict=True):
            effective[axis] = i
        actual = tuple(effective[len(effective) - len(self.source) :])
        return rank_of(actual[::-1] if self.transpose_source else actual, self.source)

    def targets_of(self, source_rank: int) -> tuple[int, ...]:
        """Return the target ranks that match the worker ``source_rank`` of the source grid."""
        index = index_of(source_rank, self.source)
        index = pad_left(
            index[::-1] if self.transpose_source else index, len(self._source_shape), 0
        )
        number = self._number(index, self.transpose_source)
        matched = dict(zip(self._matching, self._index(number, self.transpose_target), strict=True))
        choices = [
            (matched[axis],) if axis in matched else range(extent)
            for axis, extent in enumerate(self._target_shape)
        ]
        return tuple(
            sorted(
                rank_of(index[::-1] if self.transpose_target else index, self.target)
                for index in product(*choices)
            )
        )

    def _number(self, index: Sequence[int], transposed: bool) -> int:
        matching = tuple(index[axis] for axis in self._matching)
        order = column_major_number if transposed else rank_of
        return order(matching, self._matching_shape)

    def _index(self, number: int, transposed: bool) -> tuple[int, ...]:
        order = column_major_index if transposed else index_of
        return order(number, self._matching_shape)


def _effective(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return shape[::-1] if transposed else shape


def format_grid(shape: tuple[int, ...], transposed: bool) -> str:
    """Format a grid shape for error messages."""
    return f"{list(shape)} (transposed)" if transposed else f"{list(shape)}"


def misfit(
    source: tuple[int, ...],
    target: tuple[int, ...],
    transpose_source: bool,
    transpose_target: bool,
    source_name: str = "the first",
    target_name: str = "the second",
) -> str | None:
    """Return why two grids do not match; ``None`` if they do."""
    many = _effective(target, transpose_target)
    few = pad_left(_effective(source, transpose_source), len(many), 1)
    if len(few) > len(many):
        return (
            f"{source_name} has {len(few)} axes and {target_name} {len(many)}; padded with ones on "
            f"the left, each axis must be 1 or equal"
        )
    for axis, (a, b) in enumerate(zip(few, many, strict=True)):
        if a not in (1, b):
            return (
                f"axis {axis} of {source_name} is {a} and of {target_name} {b}, counted in "
                f"{list(few)} and {list(many)}; each axis of {source_name} must be 1 or equal"
            )
    return None


def plan_broadcast(
    rank: int,
    targets: Sequence[int] | None,
    source: int | None,
    source_targets: Sequence[int],
    input_shape: tuple[int, ...] | None,
    output_shape: tuple[int, ...] | None,
    key: tuple[object, ...],
) -> Plan:
    """Plan one worker's part of a broadcast. The adjoint is a sum-reduce.

    All ranks are positions in a partition of the workers of both grids.

    Args:
        rank: rank of this worker.
        targets: ranks that get a copy of this worker's block, ``None`` if it is not a source.
        source: rank whose block this worker gets, ``None`` if it is not a target.
        source_targets: all ranks that get a copy of the block of ``source``.
        input_shape: shape of this worker's block, ``None`` if it is not a source.
        output_shape: shape of the block this worker gets, ``None`` if it is not a target.
        key: identification of the operator, the same on all ranks.
    """
    moves: list[Move] = []
    sends: list[Message] = []
    receives: list[Message] = []
    collectives: list[Collective] = []
    groups: dict[int, Sequence[int]] = {}
    if targets is not None:
        groups[rank] = targets
    if source is not None:
        groups[source] = source_targets
    for root in sorted(groups):
        members = tuple(sorted({root, *groups[root]}))
        if len(members) > 2:
            collectives.append(Collective("broadcast", members, root, root in groups[root]))
            continue
        # One or two workers need no communicator, since a copy and a message suffice.
        if root == rank and input_shape is not None:
            block = Box.whole(input_shape)
            moves += [Move(block, block)] if root in groups[root] else []
            sends += [Message(peer, (block,)) for peer in members if peer != rank and block.volume]
        elif output_shape is not None:
            block = Box.whole(output_shape)
            receives += [Message(root, (block,))] if block.volume else []
    stage = Stage(
        input_shape,
        output_shape,
        tuple(moves),
        tuple(sends),
        tuple(receives),
        tuple(collectives),
        sources_overlap=bool(moves and sends),
    )
    return Plan(key, rank, (stage,))


def plan_all_sum_reduce(
    rank: int, members: Sequence[int], shape: tuple[int, ...], key: tuple[object, ...]
) -> Plan:
    """Plan one worker's part of an all-sum over ``members``. Self-adjoint."""
    members = tuple(sorted(members))
    if len(members) == 1:
        block = Box.whole(shape)
        stage = Stage(shape, shape, moves=(Move(block, block),))
    else:
        total = Collective("all_reduce", members, members[0], True)
        stage = Stage(shape, shape, collectives=(total,))
    return Plan(key, rank, (stage,))
