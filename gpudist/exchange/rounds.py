"""Rounds: one stage of each of several movements, with all messages in flight together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from gpudist import recycling
from gpudist.checks.storage import storage_problem, with_memory
from gpudist.errors import ShapeError, TransportError
from gpudist.exchange.movement import Movement
from gpudist.exchange.reference_executor import Arrival, finish, post
from gpudist.geometry.boxes import Stage
from gpudist.transport.base import RoundRunner, Signature, StageCall, StagesInFlight, Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.flight_recorder import Activity, Post
from gpudist.world.partition import Partition

Blocks = list[torch.Tensor | None]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def output_form(movement: Movement, strides: Sequence[int]) -> torch.memory_format:
    """Return the memory format of a movement's output for an input with these strides."""
    form = None
    for stage, partition in movement.steps:
        form = _kept_form(stage, partition, strides)
        shape = stage.output_shape or ()
        strides = torch.empty(shape, device="meta", memory_format=form).stride()
    return form if form is not None else torch.contiguous_format


def _kept_form(
    stage: Stage, partition: Partition, strides: Sequence[int]
) -> torch.memory_format | None:
    """Return the memory format of the input if the output keeps it, otherwise ``None``."""
    given, shape = stage.input_shape, stage.output_shape
    if given is None or shape is None or not partition.wire.keeps_layout:
        return None
    form = _CHANNELS_LAST.get(len(given)) if len(given) == len(shape) else None
    x = torch.empty_strided(given, strides, device="meta")
    if form is None or x.is_contiguous() or not x.is_contiguous(memory_format=form):
        return None
    return form


class InFlight:
    """Movements in flight. Dropping it before waiting for all of them fails the world."""

    def __init__(
        self,
        outputs: Blocks,
        wire: Transport,
        label: str = "",
        stages: StagesInFlight | None = None,
        numbers: dict[int, int] | None = None,
        kept: object = None,
    ) -> None:
        self.outputs = outputs
        self._wire = wire
        self._label = label
        self._stages = stages
        self._waiting = numbers or {}
        self._kept = kept

    def wait(self, i: int) -> torch.Tensor:
        """Wait for movement ``i`` and return its output."""
        number = self._waiting.pop(i, None)
        if number is not None:
            assert self._stages is not None
            try:
                self._stages.wait(number)
            except BaseException:
                self._waiting.clear()
                raise
        output = self.outputs[i]
        assert output is not None
        return output

    def __del__(self) -> None:
        if self._waiting:
            text = f"rank {self._wire.rank} started '{self._label}' and did not wait for it"
            self._wire.abort(Failure.from_exception(TransportError(text), self._wire.rank))


class MovementPart:
    """Stage of one movement, with everything that its calls need."""

    def __init__(self, movement: Movement, depth: int, index: int) -> None:
        self.stage, self.partition = movement.steps[depth]
        self.movement = movement
        self.index = index
        self.comes_from_outside = depth == 0
        self.takes = self.stage.input_shape is not None
        self.gives = self.stage.output_shape is not None
        self.bound: dict[tuple[int, ...], object] = {}
        self.makers: dict[tuple[int, ...], Callable[[], torch.Tensor]] = {}
        self._accumulating: dict[tuple[int, ...], object] = {}
        self.make_output = self._output_maker(depth == len(movement.steps) - 1)

    def _output_maker(self, is_last: bool) -> Callable[[], torch.Tensor | None]:
        shape, movement = self.stage.output_shape, self.movement
        if shape is not None:
            return recycling.maker(shape, movement.dtype, self.partition.device)
        if not is_last:
            return lambda: None
        # Without a block, the caller gets a placeholder. A placeholder with cells is the gradient
        # of a tensor that was not moved, which is zero.
        shape, dtype = movement.output_shape, movement.output_dtype
        return partial(torch.zeros, shape, dtype=dtype, device=self.partition.device)

    def posts(self, accumulates: bool = False) -> tuple[Post, ...]:
        """Return the messages that this rank sends and receives in the stage."""
        if not self.stage.communicates:
            return ()
        rank = self.partition.plan_rank
        return self.partition.wire.posts_of(
            self.stage, self.partition.ranks, rank, self.movement.dtype, accumulates
        )

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """Check an input given by the caller and return it with readable memory."""
        movement, device = self.movement, self.partition.device
        if x.device != device:
            raise ShapeError(
                f"{movement.label}: the tensor is on {x.device}, its partition is on {device}; "
                "move it there with .to()"
            )
        if x.shape != movement.input_shape or x.dtype != movement.input_dtype:
            raise ShapeError(
                f"{movement.label}: bound to a {movement.input_dtype} tensor of shape "
                f"{list(movement.input_shape)}, got {x.dtype} of shape {list(x.shape)}"
            )
        problem = storage_problem(x)
        if problem:
            raise ShapeError(f"{movement.label}: {problem}")
        return with_memory(x)

    def check_target(self, target: torch.Tensor | None) -> None:
        """Raise if the output cannot be added to ``target``."""
        if target is None:
            return
        shape, dtype, device = self.stage.output_shape, self.movement.dtype, self.partition.device
        if target.device != device:
            raise ShapeError(
                f"{self.movement.label}: its output on {device} cannot be added to a tensor on "
                f"{target.device}"
            )
        if target.shape != shape or target.dtype != dtype:
            raise ShapeError(
                f"{self.movement.label}: its {dtype} output of shape {shape} cannot be added to a "
                f"{target.dtype} tensor of shape {list(target.shape)}"
            )

    def call(
        self, x: torch.Tensor | None, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, StageCall | None]:
        """Return the output, ``into`` or a new tensor, and the call that fills it, if any."""
        if self.takes:
            assert x is not None
            strides, address = x.stride(), x.data_ptr()
        elif self.gives:
            strides, address = (), 0
        else:
            return self.make_output(), None
        stages = self.bound if into is None else self._accumulating
        stage = stages.get(strides) or self.bind(strides, into is not None)
        y = into if into is not None else self.makers.get(strides, self.make_output)()
        assert y is not None  # Movements of one stage return at least a placeholder.
        return y, (stage, address, y.data_ptr())

    def bind(self, strides: tuple[int, ...], accumulates: bool = False) -> object:
        """Return the stage bound by the transport for an input with these strides, cached.

        Threads that bind it concurrently all get the same one, which may already be running.
        """
        rank = self.partition.plan_rank
        form = None if accumulates else _kept_form(self.stage, self.partition, strides)
        output_strides = None
        if form is not None:
            shape = self.stage.output_shape or ()
            output_strides = torch.empty(shape, device="meta", memory_format=form).stride()
            self.makers[strides] = partial(
                torch.empty, shape, dtype=self.movement.dtype, device=self.partition.device,
                memory_format=form,
            )  # fmt: skip
        stage = self.partition.wire.bind_stage(
            self.stage, self.partition.ranks, rank, strides, self.movement.dtype,
            self.movement.fill, accumulates, output_strides,
        )  # fmt: skip
        return (self._accumulating if accumulates else self.bound).setdefault(strides, stage)


class Round:
    """One stage each of several movements, executed together."""

    def __init__(
        self, wire: Transport, movements: tuple[Movement, ...], depth: int, signature: Signature
    ) -> None:
        self._wire = wire
        self.signature = signature
        self.parts = [
            MovementPart(movement, depth, i)
            for i, movement in enumerate(movements)
            if depth < len(movement.steps)
        ]
        self._activities: dict[tuple[bool, ...], Activity] = {}
        self._communicates = any(part.stage.communicates for part in self.parts)
        # Maps the blocks of the movements to the outputs of the parts, ``None`` for a missing one.
        self.run: RoundRunner = self._run_plain
        if wire.packs:
            self.run = wire.bind_round(signature if self._communicates else None, self.parts)

    def start(self, blocks: Blocks, into: Blocks) -> InFlight:
        """Start moving the blocks; see :func:`~gpudist.exchange.start`."""
        if not (self._communicates and self._adds_in_place(into)):
            return self._complete(blocks, into)
        if not self._wire.packs:
            return InFlight(self._run_plain(blocks, into), self._wire)
        calls: list[StageCall] = []
        outputs: Blocks = []
        numbers: dict[int, int] = {}
        for part, x, target in zip(self.parts, blocks, into, strict=True):
            y, call = part.call(x, target)
            outputs.append(y)
            if call is not None:
                numbers[part.index] = len(calls)
                calls.append(call)
        activity = self._activity(tuple([target is not None for target in into]))
        stages = self._wire.start_stages(self.signature, calls, activity)
        return InFlight(outputs, self._wire, self.signature.label, stages, numbers, (blocks, calls))

    def _activity(self, accumulates: tuple[bool, ...]) -> Activity:
        """Return the activity that counts a start, given which parts add to existing tensors."""
        found = self._activities.get(accumulates)
        if found is None:
            parts = zip(self.parts, accumulates, strict=True)
            posts = [post for part, adds in parts for post in part.posts(adds)]
            found = self._wire.recorder.new_activity(self.signature.label, posts)
            self._activities[accumulates] = found
        return found

    def _adds_in_place(self, into: Blocks) -> bool:
        # Each 16-bit tensor is accumulated in its own float32 copy, so no tensor may occur twice.
        there = [y for y in into if y is not None]
        narrow = [y.data_ptr() for y in there if y.dtype in (torch.float16, torch.bfloat16)]
        return all(y.is_contiguous() for y in there) and len(narrow) == len(set(narrow))

    def _complete(self, blocks: Blocks, into: Blocks) -> InFlight:
        results = self.run(blocks)
        for i, (result, target) in enumerate(zip(results, into, strict=True)):
            if target is not None and result is not None:
                results[i] = target.add_(result)
        return InFlight(results, self._wire)

    @torch.no_grad()
    def _run_plain(
        self, blocks: Sequence[torch.Tensor | None], into: Sequence[torch.Tensor | None] = ()
    ) -> Blocks:
        """Run over a transport that only sends messages.

        ``into`` has one entry per part: a tensor to add to, or ``None``.
        """
        inputs = [
            part.block(x) if part.comes_from_outside and x is not None else x
            for part, x in ((part, blocks[part.index]) for part in self.parts)
        ]
        arrivals: list[list[Arrival]] = [[] for _ in self.parts]
        if self._communicates:
            with self._wire.group(self.signature):
                arrivals = [
                    post(part.stage, part.partition, part.movement, x)
                    for part, x in zip(self.parts, inputs, strict=True)
                ]
        return [
            finish(part.stage, part.partition, part.movement, x, arrived, target)
            if part.gives
            else part.make_output()
            for part, x, arrived, target in zip(
                self.parts, inputs, arrivals, into or [None] * len(self.parts), strict=True
            )
        ]
