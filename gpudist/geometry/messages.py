"""Collectives as messages, for wires that carry nothing else."""

from __future__ import annotations

from dataclasses import replace

from gpudist.geometry.boxes import Box, Message, Move, Stage


def as_messages(stage: Stage, rank: int) -> Stage:
    """The stage of ``rank`` with every collective written as messages; the same linear map.

    A root sends its block to every member, or adds what every member sends; of an all-reduce every
    member sends to every other and adds. Sums are in ascending rank order, so that they are bitwise
    equal.
    """
    if not stage.collectives:
        return stage
    moves, sends, receives = list(stage.moves), list(stage.sends), list(stage.receives)
    adds = stage.destinations_overlap
    for collective in stage.collectives:
        others = [member for member in collective.members if member != rank]
        gives = takes = True
        if collective.kind == "broadcast":
            gives = rank == collective.root
            takes = not gives
        elif collective.kind == "reduce":
            takes = rank == collective.root
            gives = not takes
            adds |= takes
        else:
            adds = True
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
    return replace(
        stage,
        moves=tuple(moves),
        sends=tuple(sorted(sends, key=lambda message: message.peer)),
        receives=tuple(sorted(receives, key=lambda message: message.peer)),
        collectives=(),
        destinations_overlap=adds,
    )
