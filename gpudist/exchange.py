"""Carry out plans: pack, post, unpack. The only place that moves the bytes of tensors.

A :class:`Movement` is a plan bound to partitions, shapes and a dtype. Several movements are carried
out together: the messages of their first stages are in flight at once, then those of their second,
and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from gpudist.errors import ShapeError
from gpudist.geometry.boxes import Box, Plan, Stage
from gpudist.partition import Partition
from gpudist.transport.base import ReduceOp, Signature, StageCall, Transport

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Step(NamedTuple):
    """A stage, and the partition whose ranks its messages name."""

    stage: Stage
    partition: Partition


@dataclass(frozen=True, eq=False)
class Movement:
    """This rank's part of a linear operator, ready to be carried out on a tensor.

    Attributes:
        label: the operator and partitions in words.
        identity: 16 bytes all ranks of the operator share.
        steps: carried out in order; as many on every rank.
        input_shape, output_shape: of this rank's tensors, zero-volume placeholders included.
        dtype: of the data that moves.
        input_dtype, output_dtype: of this rank's tensors; a placeholder keeps its own.
        fill: value of output cells nothing moves to. It is a constant, so adjoints fill with zero.
        packed: stages bound by a transport that packs, by number and strides of the tensors.
    """

    label: str
    identity: bytes
    steps: tuple[Step, ...]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: torch.dtype
    input_dtype: torch.dtype
    output_dtype: torch.dtype
    fill: float = 0.0
    _forward: Movement | None = field(default=None, repr=False)
    packed: dict[tuple[object, ...], object] = field(default_factory=dict, repr=False)

    @cached_property
    def T(self) -> Movement:
        """The adjoint movement. ``movement.T.T`` is the linear part of ``movement``."""
        if self._forward is not None:
            return self._forward
        linear = self if self.fill == 0 else self._with(fill=0.0)
        return Movement(
            f"adjoint of {self.label}",
            blake2b(self.identity + b"T", digest_size=16).digest(),
            tuple(Step(step.stage.T, step.partition) for step in reversed(self.steps)),
            self.output_shape,
            self.input_shape,
            self.dtype,
            self.output_dtype,
            self.input_dtype,
            _forward=linear,
        )

    def then(self, other: Movement) -> Movement:
        """The composition: this movement, then ``other``, as one."""
        return Movement(
            f"{self.label}, then {other.label}",
            blake2b(self.identity + other.identity, digest_size=16).digest(),
            self.steps + other.steps,
            self.input_shape,
            other.output_shape,
            self.dtype,
            self.input_dtype,
            other.output_dtype,
            self.fill,
        )

    def _with(self, fill: float) -> Movement:
        return Movement(
            self.label,
            self.identity,
            self.steps,
            self.input_shape,
            self.output_shape,
            self.dtype,
            self.input_dtype,
            self.output_dtype,
            fill,
        )


def bind(
    plan: Plan,
    partition: Partition,
    label: str,
    dtype: torch.dtype,
    placeholder: torch.Size | tuple[int, ...],
    placeholder_dtype: torch.dtype,
    empty: tuple[int, ...] = (0,),
    fill: float = 0.0,
) -> Movement:
    """Bind ``plan``, whose ranks are those of ``partition``, to tensors.

    Args:
        plan: this rank's plan.
        partition: holds every worker that takes part.
        label: the operator in words.
        dtype: of the data that moves.
        placeholder: shape of this rank's input where the plan gives it no block.
        placeholder_dtype: its dtype; a zero-volume output has the same.
        empty: shape of this rank's output where the plan gives it no block.
        fill: value of output cells nothing moves to.

    Raises:
        ShapeError: the plan, or its adjoint, adds but the dtype has no sum.
    """
    adds = any(
        stage.destinations_overlap or any(c.kind != "broadcast" for c in stage.collectives)
        for stage in plan.stages
    )
    if adds and dtype == torch.bool:
        raise ShapeError(f"{label}: torch.bool has no sum; convert to an integer dtype first")
    has_input, has_output = plan.input_shape is not None, plan.output_shape is not None
    key = (plan.identity, partition.digest, str(dtype))
    return Movement(
        f"{label} of {dtype}",
        blake2b(repr(key).encode(), digest_size=16).digest(),
        tuple(Step(stage, partition) for stage in plan.stages),
        plan.input_shape if plan.input_shape is not None else tuple(placeholder),
        plan.output_shape if plan.output_shape is not None else tuple(empty),
        dtype,
        dtype if has_input else placeholder_dtype,
        dtype if has_output else placeholder_dtype,
        fill,
    )


def carry_out(
    movements: Sequence[Movement],
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Move every input along its movement, all in flight together; returns new tensors.

    Collective over the partitions of the movements. Inputs are never modified. Where ``into`` has a
    tensor, what arrives is added to it; see :func:`~gpudist.in_flight.add_into`.

    Raises:
        ShapeError: an input does not have the shape or dtype its movement was bound to.
        PlanMismatch: ranks carry out different movements.
    """
    for movement, x in zip(movements, inputs, strict=True):
        if x.shape != movement.input_shape or x.dtype != movement.input_dtype:
            raise ShapeError(
                f"{movement.label}: bound to a {movement.input_dtype} tensor of shape "
                f"{list(movement.input_shape)}, got {x.dtype} of shape {list(x.shape)}"
            )
    blocks: list[torch.Tensor | None] = [
        x.detach().resolve_conj().resolve_neg() if x.is_complex() or x.is_neg() else x
        for x in inputs
    ]
    wire = movements[0].steps[0].partition.wire
    carry_out_stages = _carry_out_packed if wire.packs else _carry_out_stages
    depths = max([len(movement.steps) for movement in movements])
    for depth in range(depths):
        now = [i for i, movement in enumerate(movements) if depth < len(movement.steps)]
        together = tuple([movements[i] for i in now])
        outputs = [into[i] if into is not None else None for i in now]
        results = carry_out_stages(wire, together, [blocks[i] for i in now], outputs, depth)
        for i, result in zip(now, results, strict=True):
            blocks[i] = result
    return tuple(
        [
            block
            if block is not None
            else torch.empty(movement.output_shape, dtype=movement.output_dtype, device=x.device)
            for block, movement, x in zip(blocks, movements, inputs, strict=True)
        ]
    )


def _carry_out_packed(
    wire: Transport,
    movements: tuple[Movement, ...],
    inputs: list[torch.Tensor | None],
    into: list[torch.Tensor | None],
    depth: int,
) -> list[torch.Tensor | None]:
    """One stage of each movement, by a transport that packs: one call for all of them."""
    outputs: list[torch.Tensor | None] = []
    calls: list[StageCall] = []
    communicates = False
    for movement, x, y in zip(movements, inputs, into, strict=True):
        stage, partition = movement.steps[depth]
        communicates = communicates or stage.communicates
        added_to = y.stride() if y is not None else None
        if y is None and stage.output_shape is not None:
            y = torch.empty(stage.output_shape, dtype=movement.dtype, device=partition.device)
        outputs.append(y)
        if stage.input_shape is None:
            x = None
        if x is not None or y is not None:
            strides = x.stride() if x is not None else ()
            key = (depth, strides, added_to)
            bound = movement.packed.get(key) or _bind_stage(movement, *key)
            calls.append(
                (bound, 0 if x is None else x.data_ptr(), 0 if y is None else y.data_ptr())
            )
    if communicates:
        wire.run_stages(_signature(movements, depth), calls)
    else:
        for call in calls:
            wire.run_local_stage(call)
    return outputs


def _bind_stage(
    movement: Movement, depth: int, strides: tuple[int, ...], added_to: tuple[int, ...] | None
) -> object:
    """The stage bound by the transport, for tensors of these strides; remembered."""
    stage, partition = movement.steps[depth]
    rank = partition.rank if partition.rank is not None else -1
    bound = partition.wire.bind_stage(
        stage, partition.ranks, rank, strides, movement.dtype, movement.fill, added_to
    )
    movement.packed[depth, strides, added_to] = bound
    return bound


@torch.no_grad()
def _carry_out_stages(
    wire: Transport,
    movements: tuple[Movement, ...],
    inputs: list[torch.Tensor | None],
    into: list[torch.Tensor | None],
    depth: int,
) -> list[torch.Tensor | None]:
    """One stage of each movement, by a transport that only carries messages."""
    steps = [movement.steps[depth] for movement in movements]
    arrivals: list[list[_Arrival]] = [[] for _ in steps]
    if any(step.stage.communicates for step in steps):
        with wire.group(_signature(movements, depth)):
            arrivals = [
                _post(step, x, movement)
                for step, x, movement in zip(steps, inputs, movements, strict=True)
            ]
    finished = zip(steps, inputs, arrivals, movements, into, strict=True)
    return [_finish(step, x, arrived, movement, y) for step, x, arrived, movement, y in finished]


def all_reduce(x: torch.Tensor, partition: Partition, op: ReduceOp = "sum") -> torch.Tensor:
    """The members' equally shaped tensors combined element by element; not differentiable."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    key = repr((op, tuple(x.shape), str(x.dtype))).encode() + partition.digest
    label = f"all_reduce({op}) of {x.dtype} {list(x.shape)} on {list(partition.shape)}"
    with partition.wire.group(Signature(label, blake2b(key, digest_size=16).digest())):
        partition.communicator.all_reduce(_plain(x.detach()), output, op)
    return output


class _Arrival(NamedTuple):
    """A buffer that holds boxes of the output, one after the other, when the group has ended."""

    rank: int
    boxes: tuple[Box, ...]
    buffer: torch.Tensor


def _post(step: Step, x: torch.Tensor | None, movement: Movement) -> list[_Arrival]:
    stage, partition = step
    if not stage.communicates:
        return []
    arrivals: list[_Arrival] = []
    for message in stage.sends:
        assert x is not None
        partition.communicator.send(_pack(x, message.boxes), message.peer)
    device = partition.device
    for message in stage.receives:
        buffer = torch.empty(message.volume, dtype=movement.dtype, device=device)
        partition.communicator.recv(buffer, message.peer)
        arrivals.append(_Arrival(message.peer, message.boxes, buffer))
    for collective in stage.collectives:
        members = tuple(partition.ranks[rank] for rank in collective.members)
        communicator = partition.wire.communicator(members)
        root = collective.members.index(collective.root)
        is_root = communicator.rank == root
        takes_output = collective.kind == "all_reduce" or (
            is_root == (collective.kind == "reduce")
            or (collective.includes_root and collective.kind == "broadcast")
        )
        output = None
        if takes_output:
            assert stage.output_shape is not None
            output = torch.empty(stage.output_shape, dtype=movement.dtype, device=device)
            whole = (Box.whole(stage.output_shape),)
            arrivals.append(_Arrival(collective.root, whole, output.view(-1)))
        if collective.kind == "broadcast":
            if is_root:
                assert x is not None
                if output is not None:
                    output.copy_(x)
                communicator.broadcast(output if output is not None else _plain(x), root)
            else:
                assert output is not None
                communicator.broadcast(output, root)
        elif collective.kind == "reduce":
            gives = not is_root or collective.includes_root
            communicator.reduce(_plain(x) if gives and x is not None else None, output, root)
        else:
            assert x is not None and output is not None
            communicator.all_reduce(_plain(x), output)
    return arrivals


def _finish(
    step: Step,
    x: torch.Tensor | None,
    arrivals: list[_Arrival],
    movement: Movement,
    into: torch.Tensor | None,
) -> torch.Tensor | None:
    stage, partition = step
    shape = stage.output_shape
    if shape is None:
        return None
    adds = stage.destinations_overlap or into is not None
    whole = len(arrivals) == 1 and not stage.moves and arrivals[0].boxes == (Box.whole(shape),)
    if whole and into is None:
        return arrivals[0].buffer.view(shape)
    device = partition.device
    if into is not None:
        output = into
    elif stage.covers_output:
        output = torch.empty(shape, dtype=movement.dtype, device=device)
    else:
        wide = _WIDER.get(movement.dtype, movement.dtype)
        dtype = wide if adds else movement.dtype
        output = torch.full(shape, movement.fill, dtype=dtype, device=device)
    me = partition.rank if partition.rank is not None else -1
    arrivals = sorted(arrivals, key=lambda arrival: arrival.rank)
    before = [arrival for arrival in arrivals if arrival.rank < me]
    for arrival in before:
        _unpack(output, arrival, adds)
    for move in stage.moves:
        assert x is not None
        cells = output[move.destination.slices]
        if adds:
            cells.add_(x[move.source.slices])
        else:
            cells.copy_(x[move.source.slices])
    for arrival in arrivals[len(before) :]:
        _unpack(output, arrival, adds)
    return output.to(movement.dtype)


def _pack(x: torch.Tensor, boxes: tuple[Box, ...]) -> torch.Tensor:
    if len(boxes) == 1:
        return _plain(x[boxes[0].slices]).view(-1)
    return torch.cat([x[box.slices].reshape(-1) for box in boxes])


def _plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` in contiguous memory; torch says so of one expanded cell too, but its stride is 0."""
    return x.clone(memory_format=torch.contiguous_format) if x.numel() == 1 else x.contiguous()


def _unpack(output: torch.Tensor, arrival: _Arrival, adds: bool) -> None:
    offset = 0
    for box in arrival.boxes:
        cells = arrival.buffer[offset : offset + box.volume].view(box.shape)
        offset += box.volume
        if adds:
            output[box.slices].add_(cells)
        else:
            output[box.slices].copy_(cells)


@lru_cache(maxsize=4096)
def _signature(movements: tuple[Movement, ...], depth: int) -> Signature:
    digest = blake2b(digest_size=16)
    for movement in movements:
        digest.update(movement.identity)
    digest.update(bytes([depth % 256]))
    return Signature(" + ".join(movement.label for movement in movements), digest.digest())
