"""Express a stage by copies and messages alone, for transports without collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.boxes import Box, Collective, Message, Move, Stage, boxes_outside

# Below this size, an all-reduce is faster if every member sends its whole block to all others,
# since a second round of messages costs more than redundant additions.
_SCATTERED_BYTES = 1 << 18


@dataclass(frozen=True)
class Contribution:
    """Boxes of the output that receive an addition, from ``peer`` or from the own input.

    Attributes:
        peer: rank that sends the summands, ``None`` for this rank.
        destinations: boxes of the output.
        sources: boxes of the input to add, if ``peer`` is ``None``.
    """

    peer: int | None
    destinations: tuple[Box, ...]
    sources: tuple[Box, ...] = ()


@dataclass(frozen=True)
class MessageStage:
    """One rank's work in a stage.

    Attributes:
        fills: boxes of the output to which nothing is copied.
        moves: copies from the input to the output.
        sends: messages with boxes of the input.
        receives: messages that overwrite boxes of the output.
        sums: contributions to add to the output, one after the other.
        starts_with_copy: whether the first of the sums overwrites.
        relays: messages with boxes of the output, sent when their sums are complete.
        relayed: relayed messages from other ranks, which overwrite boxes of the output.
        collectives: collectives that the transport has a verb for, beside the messages.
    """

    fills: tuple[Box, ...] = ()
    moves: tuple[Move, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    sums: tuple[Contribution, ...] = ()
    starts_with_copy: bool = False
    relays: tuple[Message, ...] = ()
    relayed: tuple[Message, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @property
    def same_cells(self) -> bool:
        """Whether all sums go to the same cells in the same order."""
        return len({contribution.destinations for contribution in self.sums}) == 1

    @property
    def incoming(self) -> tuple[Message, ...]:
        """Received messages: first those that overwrite, then those that are added."""
        added = [
            Message(contribution.peer, contribution.destinations)
            for contribution in self.sums
            if contribution.peer is not None
        ]
        return (*self.receives, *added)


def as_messages(
    stage: Stage,
    rank: int,
    item_bytes: int,
    from_zero: bool = False,
    accumulates: bool = False,
    scatters: bool = True,
) -> MessageStage:
    """Express ``rank``'s part of ``stage`` by copies and messages; the linear map is the same.

    A root sends its block to every member, or adds the blocks that members send. In a small
    all-reduce, every member sends its block to every other member and adds. A large one is a
    sum-scatter, followed by sending the sums to all members. Sums are in ascending rank order, so
    that they are bitwise equal.

    Args:
        stage: stage of the plan of ``rank``.
        rank: this rank in the partition of the plan.
        item_bytes: size of one cell in bytes.
        from_zero: whether sums start from zeros, because they are computed in a wider dtype.
        accumulates: whether the output already has values, to which everything is added.
        scatters: whether a large all-reduce may relay sums.
    """
    if scatters and not (from_zero or accumulates):
        scattered = _scatter_sum(stage, rank, item_bytes)
        if scattered is not None:
            return scattered
    moves, sends, receives = list(stage.moves), list(stage.sends), list(stage.receives)
    adds = stage.destinations_overlap or accumulates
    for collective in stage.collectives:
        others = [member for member in collective.members if member != rank]
        gives, takes = _role(collective, rank)
        adds |= takes and collective.kind != "broadcast"
        if gives and stage.input_shape is not None:
            block = Box.whole(stage.input_shape)
            peers = [collective.root] if collective.kind == "reduce" else others
            sends += [Message(peer, (block,)) for peer in peers if block.volume]
        if takes and stage.output_shape is not None:
            block = Box.whole(stage.output_shape)
            peers = [collective.root] if collective.kind == "broadcast" else others
            receives += [Message(peer, (block,)) for peer in peers if block.volume]
        keeps_own = collective.kind == "all_reduce" or (
            rank == collective.root and collective.includes_root
        )
        if keeps_own and stage.input_shape is not None:
            block = Box.whole(stage.input_shape)
            moves.append(Move(block, block))
    sends.sort(key=lambda message: message.peer)
    receives.sort(key=lambda message: message.peer)
    shape = stage.output_shape
    if not adds:
        written = [move.destination for move in moves]
        written += [box for message in receives for box in message.boxes]
        fills = boxes_outside(shape, written) if shape is not None else ()
        return MessageStage(fills, tuple(moves), tuple(sends), tuple(receives))
    sums = _in_order(moves, receives, rank)
    if (from_zero and sums) or accumulates:
        return MessageStage(sends=tuple(sends), sums=sums)
    whole = MessageStage(sends=tuple(sends), sums=sums, starts_with_copy=True)
    if whole.same_cells and len(sums[0].destinations) == 1:
        fills = boxes_outside(shape, sums[0].destinations) if shape is not None else ()
        return replace(whole, fills=fills)
    # Most cells belong to this rank and no other rank adds to them: copy these, and add the others.
    base = max(moves, key=lambda move: move.destination.volume, default=None)
    first = (base,) if base is not None else ()
    fills = boxes_outside(shape, [move.destination for move in first]) if shape is not None else ()
    rest = _in_order([move for move in moves if move is not base], receives, rank)
    return MessageStage(fills, first, tuple(sends), sums=rest)


def _role(collective: Collective, rank: int) -> tuple[bool, bool]:
    if collective.kind == "all_reduce":
        return True, True
    is_root = rank == collective.root
    return (is_root, not is_root) if collective.kind == "broadcast" else (not is_root, is_root)


def _in_order(
    moves: Sequence[Move], receives: Sequence[Message], rank: int
) -> tuple[Contribution, ...]:
    sums = [Contribution(message.peer, message.boxes) for message in receives]
    if moves:
        destinations = tuple(move.destination for move in moves)
        own_contribution = Contribution(None, destinations, tuple(move.source for move in moves))
        sums.insert(sum(message.peer < rank for message in receives), own_contribution)
    return tuple(sums)


def _scatter_sum(stage: Stage, rank: int, item_bytes: int) -> MessageStage | None:
    """Return an all-reduce in which every member sums and relays one part, or ``None``."""
    if len(stage.collectives) != 1 or stage.collectives[0].kind != "all_reduce":
        return None
    shape, members = stage.output_shape, stage.collectives[0].members
    assert shape is not None
    if Box.whole(shape).volume * item_bytes < _SCATTERED_BYTES:
        return None
    # Split one dim: the first that gives parts of nearly equal size, or else the longest.
    fine = [d for d, extent in enumerate(shape) if extent >= 8 * len(members)]
    dim = fine[0] if fine else shape.index(max(shape))
    blocks = Blocks(shape[dim], len(members))
    parts = {member: _part(shape, dim, *blocks.block(i)) for i, member in enumerate(members)}
    mine = parts[rank]
    others = [member for member in members if member != rank and parts[member].volume]
    receivers = [member for member in members if member != rank] if mine.volume else []
    own_contribution = Contribution(None, (mine,), (mine,))
    sums = [
        own_contribution if member == rank else Contribution(member, (mine,)) for member in members
    ]
    return MessageStage(
        sends=tuple(Message(member, (parts[member],)) for member in others),
        sums=tuple(sums) if mine.volume else (),
        starts_with_copy=True,
        relays=tuple(Message(member, (mine,)) for member in receivers),
        relayed=tuple(Message(member, (parts[member],)) for member in others),
    )


def _part(shape: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    whole = Box.whole(shape)
    return Box(
        (*whole.start[:dim], start, *whole.start[dim + 1 :]),
        (*whole.stop[:dim], stop, *whole.stop[dim + 1 :]),
    )
