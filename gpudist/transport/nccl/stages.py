"""Lower a stage of a plan to a GPU program: packing jobs, calls of NCCL, and output jobs.

A strategy decides how each collective of a stage is executed; everything else follows from the
boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from gpudist.errors import TransportError
from gpudist.geometry.boxes import Box, Collective, Message, Stage, contiguous_strides
from gpudist.geometry.combines import Combine, Source, combines
from gpudist.geometry.messages import MessageStage, as_messages
from gpudist.transport.nccl.program import (
    BufferName,
    BufferView,
    CombineJob,
    Lowered,
    NcclStep,
)
from gpudist.transport.nccl.verbs import REAL_OF, REDUCED

# Function that returns whether NCCL executes a collective, instead of messages; equal on all of its
# members.
Strategy = Callable[[Collective, torch.dtype], bool]


def collectives_by_nccl(collective: Collective, dtype: torch.dtype) -> bool:
    """Return whether NCCL supports a collective for ``dtype``, and messages are not as good.

    Between two ranks, a broadcast or a reduction is one message. An all-reduce moves the bytes that
    two messages move and gives the bits of their sum, without a second pass over the memory.
    """
    knows = collective.kind == "broadcast" or dtype in REDUCED or dtype in REAL_OF
    return knows and (len(collective.members) > 2 or collective.kind == "all_reduce")


def collectives_by_messages(collective: Collective, dtype: torch.dtype) -> bool:
    """Return ``False``: all sums are in ascending rank order, as over other transports."""
    return False


def carry_by_nccl(
    stage: Stage, rank: int, dtype: torch.dtype, accumulates: bool, strategy: Strategy
) -> MessageStage:
    """Express a stage by messages, and the collectives of NCCL that ``strategy`` selects."""
    by_nccl = tuple(c for c in stage.collectives if strategy(c, dtype))
    others = tuple(c for c in stage.collectives if c not in by_nccl)
    messages = as_messages(
        replace(stage, collectives=others), rank, dtype.itemsize,
        accumulates=accumulates, scatters=False,
    )  # fmt: skip
    return replace(messages, collectives=by_nccl)


def lower(
    stage: Stage,
    ranks: Sequence[int],
    rank: int,
    input_strides: Sequence[int],
    dtype: torch.dtype,
    accumulates: bool,
    strategy: Strategy = collectives_by_nccl,
    output_strides: Sequence[int] | None = None,
    *,
    is_guarded: bool = True,
    in_graph: bool = False,
) -> Lowered:
    """Lower ``stage`` to the program of ``rank``.

    Args:
        stage: stage of this rank's plan.
        ranks: world rank of each rank in the stage.
        rank: rank of this process in the stage, -1 if it takes no part.
        input_strides: strides of the input, in items.
        dtype: dtype of the data.
        accumulates: whether received data is added to existing values of the output.
        strategy: decides which collectives NCCL executes.
        output_strides: strides of the output, in items; contiguous if ``None``.
        is_guarded: whether cells that NCCL writes become NaN if the world has failed.
        in_graph: whether the stage is part of a captured graph. Then messages are sent from and
            received in staging memory only, and NCCL never gets the address of a tensor: in graphs,
            NCCL registers some kinds of memory automatically, and both sides of a message must use
            the same kind.
    """
    boxes = carry_by_nccl(stage, rank, dtype, accumulates, strategy)
    lowered = Lowered(dtype, in_graph=in_graph)
    strides = tuple(input_strides)
    output = tuple(output_strides or contiguous_strides(stage.output_shape or ()))
    for message in boxes.sends:
        _send(lowered, message, ranks[message.peer], strides)
    collectives = boxes.collectives
    filled = _collectives(lowered, collectives, stage, ranks, rank, strides, output, accumulates)
    if stage.output_shape is not None and not filled:
        _receive(lowered, boxes, ranks, strides, output, accumulates)
    if not is_guarded:
        lowered.after = [job for job in lowered.after if not job.there]
    return lowered


def _send(lowered: Lowered, message: Message, peer: int, strides: tuple[int, ...]) -> None:
    item = lowered.dtype.itemsize
    nbytes = message.volume * item
    if _is_direct(lowered, message, strides):
        offset = _position(message.boxes[0].start, strides) * item
        step = NcclStep("send", None, peer, "input", offset, "sent", 0, nbytes, "uint8")
    else:
        start = lowered.room("sent", nbytes)
        _pack(lowered, message.boxes, strides, start)
        step = NcclStep("send", None, peer, "sent", start, "sent", 0, nbytes, "uint8")
    lowered.steps.append(step)


def _pack(
    lowered: Lowered, boxes: Sequence[Box], strides: tuple[int, ...], start_bytes: int
) -> None:
    position = start_bytes // lowered.dtype.itemsize
    for box in boxes:
        source = BufferView("input", _position(box.start, strides), strides)
        target = BufferView("sent", position, contiguous_strides(box.shape))
        lowered.before.append(CombineJob(box.shape, target, (source,)))
        position += box.volume


def _receive(
    lowered: Lowered,
    boxes: MessageStage,
    ranks: Sequence[int],
    strides: tuple[int, ...],
    output: tuple[int, ...],
    accumulates: bool,
) -> None:
    """Append the receives of a stage and the jobs that compute the output from them."""
    item = lowered.dtype.itemsize
    pieces = combines(boxes, accumulates)
    starts: dict[int, int] = {}  # Offsets of messages in the staging buffer, in items.
    in_place: set[int] = set()
    for number, message in enumerate(boxes.incoming):
        nbytes = message.volume * item
        if _lands_whole(lowered, number, message, pieces, output):
            in_place.add(number)
            offset = _position(message.boxes[0].start, output) * item
            target: tuple[BufferName, int] = ("output", offset)
        else:
            start = lowered.room("received", nbytes)
            starts[number] = start // item
            target = ("received", start)
        lowered.steps.append(
            NcclStep("receive", None, ranks[message.peer], "input", 0, *target, nbytes, "uint8")
        )

    def view(source: Source) -> BufferView:
        if source.of_output:
            return BufferView("output", _position(source.box.start, output), output)
        if source.message is None:
            return BufferView("input", _position(source.box.start, strides), strides)
        parts = boxes.incoming[source.message].boxes
        before = sum(part.volume for part in parts[: source.part])
        inner = contiguous_strides(parts[source.part].shape)
        position = starts[source.message] + before + _position(source.box.start, inner)
        return BufferView("received", position, inner)

    for piece in pieces:
        box = piece.destination
        there = any(source.message in in_place for source in piece.sources)
        summands = () if there else tuple(view(source) for source in piece.sources)
        destination = BufferView("output", _position(box.start, output), output)
        lowered.after.append(CombineJob(box.shape, destination, summands, there))


def _is_direct(lowered: Lowered, message: Message, strides: tuple[int, ...]) -> bool:
    if lowered.in_graph or len(message.boxes) != 1:
        return False
    return _is_contiguous(message.boxes[0].shape, strides)


def _lands_whole(
    lowered: Lowered,
    number: int,
    message: Message,
    pieces: Sequence[Combine],
    output: tuple[int, ...],
) -> bool:
    if not _is_direct(lowered, message, output):
        return False
    users = [p for p in pieces if any(source.message == number for source in p.sources)]
    return len(users) == 1 and len(users[0].sources) == 1


def _collectives(
    lowered: Lowered,
    collectives: Sequence[Collective],
    stage: Stage,
    ranks: Sequence[int],
    rank: int,
    strides: tuple[int, ...],
    output: tuple[int, ...],
    accumulates: bool,
) -> bool:
    """Append the collectives that NCCL executes; return whether one of them fills the output."""
    filled = False
    for collective in collectives:
        is_root = rank == collective.root
        takes = (
            collective.kind == "all_reduce"
            or (is_root if collective.kind == "reduce" else not is_root)
            or (is_root and collective.includes_root)
        )
        shape = stage.output_shape if takes else stage.input_shape
        assert shape is not None
        if prod(shape) == 0:
            filled |= takes
            continue
        result = (output, accumulates) if takes else None
        _collective(lowered, collective, shape, ranks, rank, strides, result)
        filled |= takes
    if filled and (stage.moves or stage.receives):
        raise TransportError("a stage whose output is filled by a collective also copies boxes")
    return filled


def _collective(
    lowered: Lowered,
    collective: Collective,
    shape: tuple[int, ...],
    ranks: Sequence[int],
    rank: int,
    strides: tuple[int, ...],
    result: tuple[tuple[int, ...], bool] | None,
) -> None:
    members = sorted(collective.members)
    root = members.index(collective.root)
    nbytes = prod(shape) * lowered.dtype.itemsize
    source, offset = _contribution(lowered, collective, shape, rank, strides, nbytes)
    target, to_offset = source, offset  # In place: NCCL leaves the data unchanged.
    if result is not None:
        target, to_offset = _result(lowered, shape, nbytes, *result)
        if source == "output":  # The receiver of a broadcast contributes nothing.
            source, offset = target, to_offset
    if collective.kind == "broadcast":
        count, dtype = nbytes, "uint8"
    else:
        real = REAL_OF.get(lowered.dtype, lowered.dtype)
        count, dtype = nbytes // real.itemsize, REDUCED[real]
    lowered.steps.append(
        NcclStep(
            collective.kind, tuple(ranks[member] for member in members), root,
            source, offset, target, to_offset, count, dtype,
        )
    )  # fmt: skip


def _contribution(
    lowered: Lowered,
    collective: Collective,
    shape: tuple[int, ...],
    rank: int,
    strides: tuple[int, ...],
    nbytes: int,
) -> tuple[BufferName, int]:
    """Return buffer and offset of this rank's contribution: input, packed copy, zeros or none."""
    is_root = rank == collective.root
    if collective.kind == "broadcast" and not is_root:
        return "output", 0
    if collective.kind == "reduce" and is_root and not collective.includes_root:
        start = lowered.room("sent", nbytes)
        zeros = BufferView("sent", start // lowered.dtype.itemsize, contiguous_strides(shape))
        lowered.before.append(CombineJob(shape, zeros))
        return "sent", start
    if not lowered.in_graph and _is_contiguous(shape, strides):
        return "input", 0
    start = lowered.room("sent", nbytes)
    _pack(lowered, (Box.whole(shape),), strides, start)
    return "sent", start


def _result(
    lowered: Lowered,
    shape: tuple[int, ...],
    nbytes: int,
    strides: tuple[int, ...],
    accumulates: bool,
) -> tuple[BufferName, int]:
    """Return buffer and offset of a collective's result; append the job for the output."""
    output = BufferView("output", 0, strides)
    if not (accumulates or lowered.in_graph) and _is_contiguous(shape, strides):
        lowered.after.append(CombineJob(shape, output, there=True))
        return "output", 0
    start = lowered.room("received", nbytes)
    came = BufferView("received", start // lowered.dtype.itemsize, contiguous_strides(shape))
    lowered.after.append(CombineJob(shape, output, (output, came) if accumulates else (came,)))
    return "received", start


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _position(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))
