"""Boxes, and plans of the boxes that one rank copies, sends and receives.

A plan is one rank's part of a linear operator: every output cell is the sum of the input cells that
are moved to it. The boxes determine whether overwriting suffices to compute that sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import lt, sub
from typing import Literal

from gpudist.checks.digest import digest_of, text_of


@dataclass(frozen=True)
class Box:
    """A half-open range of cells in every dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All cells of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @cached_property
    def volume(self) -> int:
        """Number of cells."""
        return prod(max(0, n) for n in self.shape)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def relative_to(self, offset: Sequence[int]) -> Box:
        """Return the box in coordinates with their origin at ``offset``."""
        return Box(
            tuple(start - o for start, o in zip(self.start, offset, strict=True)),
            tuple(stop - o for stop, o in zip(self.stop, offset, strict=True)),
        )


@dataclass(frozen=True)
class Move:
    """Copy of a box of this rank's input to a box of its own output."""

    source: Box
    destination: Box

    @property
    def T(self) -> Move:
        return Move(self.destination, self.source)


@dataclass(frozen=True)
class Message:
    """Boxes exchanged with ``peer``, packed one after the other in the same order on both sides.

    Boxes to send are in coordinates of the input, boxes to receive in coordinates of the output.
    """

    peer: int
    boxes: tuple[Box, ...]

    @property
    def volume(self) -> int:
        """Number of cells in the message."""
        return sum(box.volume for box in self.boxes)


CollectiveKind = Literal["broadcast", "reduce", "all_reduce"]
_ADJOINT: dict[CollectiveKind, CollectiveKind] = {
    "broadcast": "reduce",
    "reduce": "broadcast",
    "all_reduce": "all_reduce",
}


@dataclass(frozen=True)
class Collective:
    """Broadcast of a whole block from a root to a group, or reduction from the group to the root.

    Attributes:
        kind: verb of the collective; ``broadcast`` and ``reduce`` are adjoint to each other.
        members: ranks of the group, ascending, including the root.
        root: rank that has the block (``broadcast``) or gets the sum (``reduce``).
        includes_root: whether the root also gets a copy (``broadcast``) or adds its own input
            (``reduce``).
    """

    kind: CollectiveKind
    members: tuple[int, ...]
    root: int
    includes_root: bool

    @property
    def T(self) -> Collective:
        return replace(self, kind=_ADJOINT[self.kind])


@dataclass(frozen=True)
class Stage:
    """Set of messages that are in flight together.

    Attributes:
        input_shape: shape of this rank's block before the stage, ``None`` if it has none.
        output_shape: shape of this rank's block after the stage, ``None`` if it has none.
        moves: copies that stay on this rank.
        sends, receives: at most one message per peer, by ascending peer.
        collectives: whole blocks that are broadcast to or summed over a group.
        sources_overlap: whether an input cell may go to several places; the adjoint then adds.
        destinations_overlap: whether an output cell may be the sum of several input cells.
    """

    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    moves: tuple[Move, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    collectives: tuple[Collective, ...] = ()
    sources_overlap: bool = False
    destinations_overlap: bool = False

    @cached_property
    def T(self) -> Stage:
        """Adjoint stage: every cell is sent back to its source, and copies of a cell are summed."""
        return Stage(
            self.output_shape,
            self.input_shape,
            tuple(move.T for move in self.moves),
            self.receives,
            self.sends,
            tuple(collective.T for collective in self.collectives),
            self.destinations_overlap,
            self.sources_overlap,
        )

    @cached_property
    def communicates(self) -> bool:
        """Whether this rank exchanges anything with another rank."""
        return bool(self.sends or self.receives or self.collectives)

    @cached_property
    def covers_output(self) -> bool:
        """Whether every output cell is written exactly once, so that no clearing is needed."""
        if self.output_shape is None or self.destinations_overlap:
            return False
        written = sum(move.destination.volume for move in self.moves)
        written += sum(message.volume for message in self.receives)
        return written == prod(self.output_shape)


@dataclass(frozen=True)
class Plan:
    """One rank's part of a linear operator between distributed tensors.

    Attributes:
        key: properties of the operator that all ranks know: its name, and all numbers that
            determine the plan.
        rank: rank that executes this plan, in the partition to which messages refer.
        stages: stages of messages, executed one after the other.
    """

    key: tuple[object, ...]
    rank: int
    stages: tuple[Stage, ...]
    transposed: bool = False
    _original: Plan | None = field(default=None, repr=False, compare=False)

    @cached_property
    def T(self) -> Plan:
        """The adjoint plan; ``plan.T.T is plan``."""
        if self._original is not None:
            return self._original
        stages = tuple(stage.T for stage in reversed(self.stages))
        return Plan(self.key, self.rank, stages, not self.transposed, self)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        return self.stages[0].input_shape

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        return self.stages[-1].output_shape

    @property
    def is_identity(self) -> bool:
        """Whether nothing moves and no shape changes on this rank."""
        return all(
            not stage.communicates
            and stage.input_shape == stage.output_shape
            and (stage.output_shape is None or stage.covers_output)
            and all(move.source == move.destination for move in stage.moves)
            for stage in self.stages
        )

    @cached_property
    def identity(self) -> bytes:
        """Digest of 16 bytes, equal on all ranks of an operator and different for other ones."""
        return digest_of(text_of((self.key, self.transposed)).encode())


def boxes_outside(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return disjoint boxes that cover the cells of a tensor of ``shape`` outside all ``boxes``."""
    rest = [Box.whole(shape)] if prod(shape) else []
    for box in boxes:
        rest = [piece for part in rest for piece in without(part, box)]
    return tuple(rest)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the cells in both boxes, ``None`` if there are none."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Box(start, stop) if all(map(lt, start, stop)) else None


def without(part: Box, hole: Box) -> Iterator[Box]:
    """Return disjoint boxes that cover ``part`` outside ``hole``."""
    common = intersection(part, hole)
    if common is None:
        yield part
        return
    start, stop = list(part.start), list(part.stop)
    for d, (a, b) in enumerate(zip(common.start, common.stop, strict=True)):
        if start[d] < a:
            yield Box(tuple(start), (*stop[:d], a, *stop[d + 1 :]))
        if b < stop[d]:
            yield Box((*start[:d], b, *start[d + 1 :]), tuple(stop))
        start[d], stop[d] = a, b


def messages_by_peer(parts: Iterable[tuple[int, Box]]) -> tuple[Message, ...]:
    """Pack ``(peer, box)`` pairs into one message per peer; boxes keep their order.

    Both workers of a pair must list their common boxes in the same order.
    """
    grouped: dict[int, list[Box]] = {}
    for peer, box in parts:
        grouped.setdefault(peer, []).append(box)
    return tuple(Message(peer, tuple(grouped[peer])) for peer in sorted(grouped))


def stage_of(
    rank: int,
    input_shape: tuple[int, ...] | None,
    output_shape: tuple[int, ...] | None,
    gives: Sequence[tuple[int, Box]],
    takes: Sequence[tuple[int, Box]],
    sources_overlap: bool = False,
    destinations_overlap: bool = False,
) -> Stage:
    """Return the stage in which ``rank`` gives and takes boxes; those of itself are moves.

    Args:
        rank: this rank.
        input_shape, output_shape: shapes of its blocks, ``None`` if it has none.
        gives: pairs of a rank and a box in coordinates of the input.
        takes: pairs of a rank and a box in coordinates of the output. What A takes from B and what
            B gives to A are in the same order, also if A is B.
        sources_overlap, destinations_overlap: see :class:`Stage`.
    """
    kept = [box for peer, box in gives if peer == rank]
    return Stage(
        input_shape,
        output_shape,
        tuple(map(Move, kept, [box for peer, box in takes if peer == rank])),
        messages_by_peer(part for part in gives if part[0] != rank),
        messages_by_peer(part for part in takes if part[0] != rank),
        sources_overlap=sources_overlap,
        destinations_overlap=destinations_overlap,
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides in items of a contiguous tensor of ``shape``."""
    strides: list[int] = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(strides[::-1])
