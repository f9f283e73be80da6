"""Execute stages with torch operations, over transports that only send messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from gpudist.exchange.step import MovementStep
from gpudist.geometry.boxes import Box, Collective, Stage
from gpudist.geometry.messages import MessageStage, as_messages
from gpudist.recycling import maker
from gpudist.transport.base import Signature, Transport

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Arrival(NamedTuple):
    """Buffer for the data sent by ``rank``, complete when the group has ended.

    It holds boxes of the output one after the other or, if ``whole``, the entire output.
    """

    rank: int
    buffer: torch.Tensor
    whole: bool


@torch.no_grad()
def run_steps(
    wire: Transport,
    signature: Signature,
    steps: Sequence[MovementStep | None],
    tensors: Sequence[torch.Tensor | None],
    into: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor | None]:
    """Execute a step of each of several movements; return their outputs.

    Args:
        wire: transport that carries the messages.
        signature: common signature of the steps.
        steps: one per tensor, ``None`` for a tensor that is returned as it is.
        tensors: inputs.
        into: per step, a tensor to which its output is added, or ``None`` for a new tensor.
    """
    inputs = [
        x if x is None or step is None or step.input_shape is None else step.block(x)
        for step, x in zip(steps, tensors, strict=True)
    ]
    arrivals: list[list[Arrival]] = [[] for _ in steps]
    if any(step is not None and step.stage.communicates for step in steps):
        with wire.group(signature):
            arrivals = [
                [] if step is None else _post(step, x)
                for step, x in zip(steps, inputs, strict=True)
            ]
    targets = into if into is not None else [None] * len(steps)
    return [
        x if step is None else _finish(step, x, arrived, target)
        for step, x, arrived, target in zip(steps, inputs, arrivals, targets, strict=True)
    ]


def _post(step: MovementStep, x: torch.Tensor | None) -> list[Arrival]:
    # Post the messages of the step in the open group.
    stage, partition = step.stage, step.partition
    if not stage.communicates:
        return []
    if stage.collectives:
        arrivals = [_post_collective(c, step, x) for c in stage.collectives]
    else:
        arrivals = []
    boxes = _messages(stage, partition.plan_rank, step.dtype, False)
    for message in boxes.sends:
        assert x is not None
        partition.communicator.send(_pack(x, message.boxes), message.peer)
    expected = [(message.peer, message.boxes) for message in boxes.receives]
    expected += [(s.peer, s.destinations) for s in boxes.sums if s.peer is not None]
    for peer, parts in expected:
        cells = sum(box.volume for box in parts)
        buffer = maker((cells,), step.dtype, partition.device)()
        partition.communicator.recv(buffer, peer)
        arrivals.append(Arrival(peer, buffer, False))
    return [arrival for arrival in arrivals if arrival is not None]


def _finish(
    step: MovementStep,
    x: torch.Tensor | None,
    arrivals: list[Arrival],
    into: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the output of the step, or its placeholder.

    If ``into`` is given, each part of the output is added to it in order, so that the result is
    bitwise equal to that of a transport that packs.
    """
    stage, partition = step.stage, step.partition
    shape = stage.output_shape
    if shape is None:
        return step.make_output()
    for arrival in arrivals:
        if arrival.whole:
            return arrival.buffer if into is None else into.add_(arrival.buffer)
    boxes = _messages(stage, partition.plan_rank, step.dtype, into is not None)
    wide = _WIDER.get(step.dtype) if boxes.sums else None
    if into is not None:
        output = into if wide is None else into.to(wide)
    elif wide is not None:
        output = torch.zeros(shape, dtype=wide, device=partition.device)
    else:
        output = maker(shape, step.dtype, partition.device)()
    came = {arrival.rank: arrival.buffer for arrival in arrivals}
    for box in boxes.fills:
        output[box.slices] = step.fill
    for move in boxes.moves:
        assert x is not None
        output[move.destination.slices] = x[move.source.slices]
    for message in boxes.receives:
        _unpack(output, message.boxes, came[message.peer], adds=False)
    for i, contribution in enumerate(boxes.sums):
        if contribution.peer is None:
            assert x is not None
            buffer = _pack(x, contribution.sources)
        else:
            buffer = came[contribution.peer]
        adds = i > 0 or not boxes.starts_with_copy
        _unpack(output, contribution.destinations, buffer, adds)
    return output.to(step.dtype) if into is None else into.copy_(output)


def _post_collective(
    collective: Collective, step: MovementStep, x: torch.Tensor | None
) -> Arrival | None:
    stage, partition = step.stage, step.partition
    communicator = partition.wire.communicator([partition.ranks[r] for r in collective.members])
    root = collective.members.index(collective.root)
    is_root = communicator.rank == root
    takes = collective.kind == "all_reduce" or (
        is_root == (collective.kind == "reduce")
        or (collective.includes_root and collective.kind == "broadcast")
    )
    output = None
    if takes:
        assert stage.output_shape is not None
        output = maker(stage.output_shape, step.dtype, partition.device)()
    if collective.kind == "broadcast":
        if not is_root:
            assert output is not None
            communicator.broadcast(output, root)
        else:
            assert x is not None
            if output is not None:
                output.copy_(x)
            communicator.broadcast(output if output is not None else plain(x), root)
    elif collective.kind == "reduce":
        gives = not is_root or collective.includes_root
        communicator.reduce(plain(x) if gives and x is not None else None, output, root)
    else:
        assert x is not None and output is not None
        communicator.all_reduce(plain(x), output)
    return Arrival(collective.root, output, True) if output is not None else None


@lru_cache(maxsize=1024)
def _messages(stage: Stage, rank: int, dtype: torch.dtype, accumulates: bool) -> MessageStage:
    if stage.collectives:
        stage = replace(stage, collectives=())
    return as_messages(stage, rank, dtype.itemsize, dtype in _WIDER, accumulates)


def _pack(x: torch.Tensor, boxes: tuple[Box, ...]) -> torch.Tensor:
    if len(boxes) == 1:
        return plain(x[boxes[0].slices]).view(-1)
    return torch.cat([x[box.slices].reshape(-1) for box in boxes])


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in contiguous memory.

    A single expanded cell, which torch reports as contiguous although its stride is 0, is copied.
    """
    return x.clone(memory_format=torch.contiguous_format) if x.numel() == 1 else x.contiguous()


def _unpack(output: torch.Tensor, boxes: tuple[Box, ...], cells: torch.Tensor, adds: bool) -> None:
    offset = 0
    for box in boxes:
        part = cells[offset : offset + box.volume].view(box.shape)
        offset += box.volume
        if adds:
            output[box.slices].add_(part)
        else:
            output[box.slices].copy_(part)
