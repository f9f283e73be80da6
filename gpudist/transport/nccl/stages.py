"""A stage of a plan as a GPU carries it out: what is packed, NCCL's calls, what makes the output.

How each collective of a stage is carried out is a strategy; everything else follows from the boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch

from gpudist.errors import TransportError
from gpudist.geometry.boxes import Box, Collective, Message, Stage
from gpudist.geometry.combines import Combine, Source, combines
from gpudist.geometry.messages import MessageStage, as_messages
from gpudist.transport.nccl.program import (
    BufferName,
    Job,
    Lowered,
    Step,
    View,
    contiguous_strides,
)
from gpudist.transport.nccl.verbs import REAL_OF, REDUCED
from gpudist.transport.recording import Post, posts_between

# Whether a collective is NCCL's own, else messages; the same on all of its members.
Strategy = Callable[[Collective, torch.dtype], bool]


def collectives_by_nccl(collective: Collective, dtype: torch.dtype) -> bool:
    """NCCL's own where it has one for ``dtype`` and more than two ranks share it.

    Between two ranks a message says the same, and sums of messages are in ascending rank order and,
    of 16-bit floats, in float32.
    """
    knows = collective.kind == "broadcast" or dtype in REDUCED or dtype in REAL_OF
    return knows and len(collective.members) > 2


def collectives_by_messages(collective: Collective, dtype: torch.dtype) -> bool:
    """Never NCCL's own: sums in ascending rank order, the same bits as on every transport."""
    return False


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
    in_graph: bool = False,
) -> Lowered:
    """What ``rank`` does in ``stage``.

    Args:
        stage: of this rank's plan.
        ranks: world rank of each rank the stage names.
        rank: this rank among them, -1 if it has no part in the stage.
        input_strides: of the input, in items.
        dtype: of the data.
        accumulates: the output has values, to which everything that arrives is added.
        strategy: which collectives are NCCL's own.
        output_strides: of the output, in items; contiguous if ``None``.
        in_graph: the stage is part of a captured graph: every message starts from staging memory
            and arrives there, and no address of a tensor reaches NCCL. NCCL registers memory of
            some kinds by itself where it finds it in a graph, and both sides of a message have to
            be alike.
    """
    own = tuple(c for c in stage.collectives if strategy(c, dtype))
    rest = tuple(c for c in stage.collectives if not strategy(c, dtype))
    boxes = as_messages(
        replace(stage, collectives=rest), rank, dtype.itemsize,
        accumulates=accumulates, scatters=False,
    )  # fmt: skip
    lowered = Lowered(dtype, in_graph=in_graph)
    strides = tuple(input_strides)
    output = tuple(output_strides or contiguous_strides(stage.output_shape or ()))
    for message in boxes.sends:
        _send(lowered, message, ranks[message.peer], strides)
    filled = _collectives(lowered, own, stage, ranks, rank, strides, output, accumulates)
    if stage.output_shape is not None and not filled:
        _receive(lowered, boxes, ranks, strides, output, accumulates)
    return lowered


def lowered_posts(
    stage: Stage,
    ranks: Sequence[int],
    rank: int,
    dtype: torch.dtype,
    accumulates: bool,
    strategy: Strategy,
) -> tuple[Post, ...]:
    """The messages and NCCL's own collectives of what :func:`lower` makes of ``stage``."""
    own = tuple(c for c in stage.collectives if strategy(c, dtype))
    rest = tuple(c for c in stage.collectives if c not in own)
    boxes = as_messages(
        replace(stage, collectives=rest), rank, dtype.itemsize,
        accumulates=accumulates, scatters=False,
    )  # fmt: skip
    given = prod(stage.input_shape or (0,)) * dtype.itemsize
    taken = prod(stage.output_shape or (0,)) * dtype.itemsize
    posts = list(posts_between(boxes, ranks, dtype))
    for collective in own:
        is_root, kind = rank == collective.root, collective.kind
        gives = kind == "all_reduce" or is_root == (kind == "broadcast")
        takes = kind == "all_reduce" or is_root == (kind == "reduce")
        posts.append(
            Post(kind, ranks[collective.root], given if gives else 0, taken if takes else 0)
        )
    return tuple(posts)


def _send(lowered: Lowered, message: Message, peer: int, strides: tuple[int, ...]) -> None:
    item = lowered.dtype.itemsize
    nbytes = message.volume * item
    if _is_direct(lowered, message, strides):
        offset = _position(message.boxes[0].start, strides) * item
        step = Step("send", None, peer, "input", offset, "sent", 0, nbytes, "uint8")
    else:
        start = lowered.room("sent", nbytes)
        _pack(lowered, message.boxes, strides, start)
        step = Step("send", None, peer, "sent", start, "sent", 0, nbytes, "uint8")
    lowered.steps.append(step)


def _pack(
    lowered: Lowered, boxes: Sequence[Box], strides: tuple[int, ...], start_bytes: int
) -> None:
    position = start_bytes // lowered.dtype.itemsize
    for box in boxes:
        source = View("input", _position(box.start, strides), strides)
        target = View("sent", position, contiguous_strides(box.shape))
        lowered.before.append(Job(box.shape, target, (source,)))
        position += box.volume


def _receive(
    lowered: Lowered,
    boxes: MessageStage,
    ranks: Sequence[int],
    strides: tuple[int, ...],
    output: tuple[int, ...],
    accumulates: bool,
) -> None:
    """What arrives, and the jobs that make the output of it."""
    item = lowered.dtype.itemsize
    pieces = combines(boxes, accumulates)
    starts: dict[int, int] = {}  # of messages in the staging buffer, in items
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
            Step("receive", None, ranks[message.peer], "input", 0, *target, nbytes, "uint8")
        )

    def view(source: Source) -> View:
        if source.of_output:
            return View("output", _position(source.box.start, output), output)
        if source.message is None:
            return View("input", _position(source.box.start, strides), strides)
        parts = boxes.incoming[source.message].boxes
        before = sum(part.volume for part in parts[: source.part])
        inner = contiguous_strides(parts[source.part].shape)
        position = starts[source.message] + before + _position(source.box.start, inner)
        return View("received", position, inner)

    for piece in pieces:
        box = piece.destination
        there = any(source.message in in_place for source in piece.sources)
        summands = () if there else tuple(view(source) for source in piece.sources)
        destination = View("output", _position(box.start, output), output)
        lowered.after.append(Job(box.shape, destination, summands, there))


def _is_direct(lowered: Lowered, message: Message, strides: tuple[int, ...]) -> bool:
    """Whether NCCL sends or receives a message where a tensor has it, as one contiguous box."""
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
    """Whether a message is one contiguous box of the output to which nothing is added."""
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
    """NCCL's own collectives; whether one of them makes the output."""
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
        raise TransportError("a stage in which a collective makes the output copies nothing else")
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
    target, to_offset = source, offset  # NCCL leaves what has the same place as it is
    if result is not None:
        target, to_offset = _result(lowered, shape, nbytes, *result)
        if source == "output":  # the receiver of a broadcast gives nothing
            source, offset = target, to_offset
    if collective.kind == "broadcast":
        count, dtype = nbytes, "uint8"
    else:
        real = REAL_OF.get(lowered.dtype, lowered.dtype)
        count, dtype = nbytes // real.itemsize, REDUCED[real]
    lowered.steps.append(
        Step(
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
    """Where this rank's part of a collective is: its input, a packed copy, zeros or nothing."""
    is_root = rank == collective.root
    if collective.kind == "broadcast" and not is_root:
        return "output", 0
    if collective.kind == "reduce" and is_root and not collective.includes_root:
        start = lowered.room("sent", nbytes)
        zeros = View("sent", start // lowered.dtype.itemsize, contiguous_strides(shape))
        lowered.before.append(Job(shape, zeros))
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
    """Where a collective's result goes, and the job that makes the output of it."""
    output = View("output", 0, strides)
    if not (accumulates or lowered.in_graph) and _is_contiguous(shape, strides):
        lowered.after.append(Job(shape, output, there=True))
        return "output", 0
    start = lowered.room("received", nbytes)
    came = View("received", start // lowered.dtype.itemsize, contiguous_strides(shape))
    lowered.after.append(Job(shape, output, (output, came) if accumulates else (came,)))
    return "received", start


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box of ``shape`` in a tensor of ``strides`` has no gaps."""
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _position(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))
