"""Describe the output of a stage as disjoint boxes, each the sum of other boxes.

A GPU computes all of them at once, while a CPU adds one message after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpudist.geometry.boxes import Box, intersection, without
from gpudist.geometry.messages import MessageStage


@dataclass(frozen=True)
class Source:
    """Box that is added to a box of the output.

    Attributes:
        box: cells in coordinates of the input, of the output, or of a message's part.
        message: number of the message in ``MessageStage.incoming``; ``None`` for own cells.
        part: index of the box in the message, whose boxes are packed one after the other.
        of_output: whether the values are the previous values of the output.
    """

    box: Box
    message: int | None = None
    part: int = 0
    of_output: bool = False


@dataclass(frozen=True)
class Combine:
    """Box of the output that becomes the sum of boxes of its shape, in their order.

    Attributes:
        destination: box of the output.
        sources: boxes to add; empty to fill with a constant, a single one to copy.
    """

    destination: Box
    sources: tuple[Source, ...]

    def at(self, box: Box) -> Combine:
        """Return the restriction to ``box``, a box of the output within the destination."""
        sources = (
            replace(source, box=box.relative_to(_offset(source.box, self.destination)))
            for source in self.sources
        )
        return Combine(box, tuple(sources))


def combines(stage: MessageStage, accumulates: bool = False) -> tuple[Combine, ...]:
    """Return the combines of ``stage``, in which every written cell appears once.

    The sources of a cell are in the order in which the stage adds them. A fill to which something
    is added does not count as a source.

    Args:
        stage: result of ``as_messages``, without ``scatters``. With ``from_zero``, sums list only
            the cells to which something is added.
        accumulates: whether the output already has values, which are then the first source of
            every sum.
    """
    if stage.relays or stage.relayed:
        raise ValueError(
            "a relayed sum is not complete when it is sent, so it has no combines; pass a stage "
            "without scatters"
        )
    pieces = [Combine(box, ()) for box in stage.fills]
    pieces += [Combine(move.destination, (Source(move.source),)) for move in stage.moves]
    for number, message in enumerate(stage.receives):
        pieces += [_combine_received(box, number, part) for part, box in enumerate(message.boxes)]
    for i, contribution in enumerate(_contributions(stage)):
        for combine in contribution:
            if i == 0 and stage.starts_with_copy:
                pieces.append(combine)
            else:
                pieces = list(_add(pieces, combine, accumulates))
    return tuple(piece for piece in pieces if piece.destination.volume)


def _contributions(stage: MessageStage) -> Iterator[list[Combine]]:
    """Return the combines that each sum of the stage adds."""
    number = len(stage.receives)
    for contribution in stage.sums:
        boxes = contribution.destinations
        if contribution.peer is None:
            pairs = zip(boxes, contribution.sources, strict=True)
            yield [Combine(box, (Source(source),)) for box, source in pairs]
        else:
            yield [_combine_received(box, number, part) for part, box in enumerate(boxes)]
            number += 1


def _combine_received(box: Box, message: int, part: int) -> Combine:
    return Combine(box, (Source(box.relative_to(box.start), message, part),))


def _add(pieces: list[Combine], new: Combine, accumulates: bool) -> Iterator[Combine]:
    """Add ``new`` to ``pieces``, cutting them where it begins and ends."""
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
    return tuple(d - s for s, d in zip(source.start, destination.start, strict=True))
