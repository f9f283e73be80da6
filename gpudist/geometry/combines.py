"""What makes a rank's output of a stage: boxes that do not overlap, each the sum of other boxes.

A GPU makes all of them at once, where a CPU adds one message after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpudist.geometry.boxes import Box, intersection, without
from gpudist.geometry.messages import MessageStage


@dataclass(frozen=True)
class Source:
    """A box that is added.

    Attributes:
        box: in coordinates of the input, of the output, or of a message's part.
        message: number of the message in ``MessageStage.incoming``; ``None`` for this rank's own.
        part: which of the message's boxes, packed one after the other.
        of_output: the values are those the output had before.
    """

    box: Box
    message: int | None = None
    part: int = 0
    of_output: bool = False


@dataclass(frozen=True)
class Combine:
    """A box of the output that becomes the sum of boxes of its shape, in their order.

    Attributes:
        sources: none for the constant that fills, one for a copy.
    """

    destination: Box
    sources: tuple[Source, ...]

    def at(self, box: Box) -> Combine:
        """The part of it that makes ``box``, a box of the output within its destination."""
        sources = (
            replace(source, box=box.shifted(_offset(source.box, self.destination)))
            for source in self.sources
        )
        return Combine(box, tuple(sources))


def combines(stage: MessageStage, accumulates: bool = False) -> tuple[Combine, ...]:
    """What makes the output of ``stage``: every cell that anything writes appears once.

    A cell's sources are in the order in which the stage adds them. The zero of a fill to which is
    added is no source.

    Args:
        stage: of ``as_messages``, without ``scatters``. Sums that start ``from_zero`` are of the
            cells that something is added to; the stage does not name the others.
        accumulates: the output has values, the first source of what is added to it.
    """
    if stage.relays or stage.relayed:
        raise ValueError("sums that are sent on are not complete at once")
    pieces = [Combine(box, ()) for box in stage.fills]
    pieces += [Combine(move.destination, (Source(move.source),)) for move in stage.moves]
    for number, message in enumerate(stage.receives):
        pieces += [_received(box, number, part) for part, box in enumerate(message.boxes)]
    for i, contribution in enumerate(_contributions(stage)):
        for combine in contribution:
            if i == 0 and stage.starts_with_copy:
                pieces.append(combine)
            else:
                pieces = list(_added(pieces, combine, accumulates))
    return tuple(piece for piece in pieces if piece.destination.volume)


def _contributions(stage: MessageStage) -> Iterator[list[Combine]]:
    """What each of the sums adds."""
    number = len(stage.receives)
    for contribution in stage.sums:
        boxes = contribution.destinations
        if contribution.peer is None:
            own = zip(boxes, contribution.sources, strict=True)
            yield [Combine(box, (Source(source),)) for box, source in own]
        else:
            yield [_received(box, number, part) for part, box in enumerate(boxes)]
            number += 1


def _received(box: Box, message: int, part: int) -> Combine:
    return Combine(box, (Source(box.shifted(box.start), message, part),))


def _added(pieces: list[Combine], new: Combine, accumulates: bool) -> Iterator[Combine]:
    """``pieces``, to which ``new`` is added: cut where it begins and ends."""
    rest = [new.destination] if new.destination.volume else []
    for piece in pieces:
        common = intersection(piece.destination, new.destination)
        if common is None:
            yield piece
            continue
        yield Combine(common, piece.at(common).sources + new.at(common).sources)
        yield from (piece.at(outside) for outside in without(piece.destination, common))
        rest = [outside for part in rest for outside in without(part, common)]
    for box in rest:
        before = (Source(box, of_output=True),) if accumulates else ()
        yield Combine(box, before + new.at(box).sources)


def _offset(source: Box, destination: Box) -> tuple[int, ...]:
    """What leads from coordinates of ``source`` to those of ``destination``."""
    return tuple(d - s for s, d in zip(source.start, destination.start, strict=True))
