"""Boxes, and plans made of them: what one rank copies, sends and receives, and its transpose.

A plan is the rank's part of a linear operator: every output cell is the sum of the input cells
that move there. Whether that sum may be carried out by overwriting is a fact about the boxes, not
another kind of plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

from gpudist.checks.digest import digest_of


@dataclass(frozen=True)
class Box:
    """A half-open range of cells in every dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All cells of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """Number of cells."""
        return prod(max(0, n) for n in self.shape)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def shifted(self, offset: Sequence[int]) -> Box:
        """The box in coordinates whose origin lies at ``offset``."""
        return Box(
            tuple(start - o for start, o in zip(self.start, offset, strict=True)),
            tuple(stop - o for stop, o in zip(self.stop, offset, strict=True)),
        )


@dataclass(frozen=True)
class Move:
    """A box of this rank's input that lands in a box of this rank's own output."""

    source: Box
    destination: Box

    @property
    def T(self) -> Move:
        return Move(self.destination, self.source)


@dataclass(frozen=True)
class Message:
    """Boxes packed one after the other, in an order both sides share, exchanged with ``peer``.

    To send, they are in coordinates of the input; to receive, in those of the output.
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
    """A whole block that goes from a root to its group, or is summed from the group into the root.

    Attributes:
        kind: the verb. ``broadcast`` and ``reduce`` are each other's adjoint.
        members: ranks of the group, ascending, the root among them.
        root: rank that has the block (``broadcast``) or gets the sum (``reduce``).
        includes_root: the root takes a copy (``broadcast``) or adds its own input (``reduce``) too.
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
    """One set of messages that are in flight together.

    Attributes:
        input_shape: this rank's block before the stage, ``None`` if it has none.
        output_shape: this rank's block after it, ``None`` if it has none.
        moves: what stays on this rank.
        sends, receives: at most one message per peer, by ascending peer.
        collectives: whole blocks shared with or summed over a group.
        sources_overlap: a cell of the input may go to several places, so that the adjoint adds.
        destinations_overlap: a cell of the output may come from several places and is their sum.
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
        """The adjoint stage: everything goes back to its source and adds where it was copied."""
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
        """Whether this rank exchanges anything with another one."""
        return bool(self.sends or self.receives or self.collectives)

    @cached_property
    def covers_output(self) -> bool:
        """Every cell of the output is written exactly once, so that it needs no clearing."""
        if self.output_shape is None or self.destinations_overlap:
            return False
        written = sum(move.destination.volume for move in self.moves)
        written += sum(message.volume for message in self.receives)
        return written == prod(self.output_shape)


@dataclass(frozen=True)
class Plan:
    """One rank's part of a linear operator between distributed tensors.

    Attributes:
        key: what all ranks know of the operator: its name and every number the plan follows from.
        rank: the rank it is for, in the partition whose ranks the messages name.
        stages: carried out one after the other.
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
        """Nothing moves and nothing changes shape on this rank."""
        return all(
            not stage.communicates
            and stage.input_shape == stage.output_shape
            and (stage.output_shape is None or stage.covers_output)
            and all(move.source == move.destination for move in stage.moves)
            for stage in self.stages
        )

    @cached_property
    def identity(self) -> bytes:
        """16 bytes, the same on every rank of the operator and different for any other operator."""
        return digest_of(repr((self.key, self.transposed)).encode())


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes that make up the cells of a tensor of ``shape`` outside all of ``boxes``."""
    rest = [Box.whole(shape)] if prod(shape) else []
    for box in boxes:
        rest = [piece for part in rest for piece in without(part, box)]
    return tuple(rest)


def intersection(a: Box, b: Box) -> Box | None:
    """The cells of both, ``None`` if there are none."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    if any(low >= high for low, high in zip(start, stop, strict=True)):
        return None
    return Box(start, stop)


def without(part: Box, hole: Box) -> Iterator[Box]:
    """Disjoint boxes that make up ``part`` outside ``hole``."""
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
    """Pack ``(peer, box)`` into one message per peer, its boxes in the order given.

    For any two workers that order must be the same on both sides.
    """
    grouped: dict[int, list[Box]] = {}
    for peer, box in parts:
        grouped.setdefault(peer, []).append(box)
    return tuple(Message(peer, tuple(grouped[peer])) for peer in sorted(grouped))
