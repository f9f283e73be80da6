"""One stage of each of several movements, all messages in flight together."""

from __future__ import annotations

import torch

from gpudist import recycling
from gpudist.errors import TransportError
from gpudist.exchange.movement import Movement
from gpudist.exchange.plain import finish, post
from gpudist.geometry.boxes import Stage
from gpudist.partition import Partition
from gpudist.transport.base import Failure, Signature, StageCall, StagesInFlight, Transport

Blocks = list[torch.Tensor | None]


class InFlight:
    """Movements on their way. If one is dropped before all were waited for, the world ends."""

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
        """The output of movement ``i``, complete."""
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


class _Part:
    """The stage of one movement, with what each of its calls needs."""

    def __init__(self, movement: Movement, stage: Stage, partition: Partition, index: int) -> None:
        self.index = index
        self.movement = movement
        self.stage = stage
        self.partition = partition
        self.takes = stage.input_shape is not None
        self.gives = stage.output_shape is not None
        self._bound: dict[tuple[int, ...], object] = {}
        self._accumulating: dict[tuple[int, ...], object] = {}
        self._new = recycling.maker(stage.output_shape or (), movement.dtype, partition.device)

    def output(self, into: torch.Tensor | None = None) -> torch.Tensor | None:
        """A new output, or the one that is given; ``None`` if this rank gets none."""
        if not self.gives:
            return None
        return self._new() if into is None else into

    def call(self, x: torch.Tensor | None, y: torch.Tensor | None, adds: bool) -> StageCall | None:
        """The call that a transport carries out, ``None`` if this rank has no part in the stage."""
        if not self.takes:
            if y is None:
                return None
            stage = (self._accumulating if adds else self._bound).get(())
            return (stage or self._bind((), adds), 0, y.data_ptr())
        assert x is not None
        strides = x.stride()
        stage = (self._accumulating if adds else self._bound).get(strides)
        return (
            stage or self._bind(strides, adds),
            x.data_ptr(),
            0 if y is None else y.data_ptr(),
        )

    def _bind(self, strides: tuple[int, ...], accumulates: bool) -> object:
        rank = self.partition.rank if self.partition.rank is not None else -1
        stage = self.partition.wire.bind_stage(
            self.stage, self.partition.ranks, rank, strides, self.movement.dtype,
            self.movement.fill, accumulates,
        )  # fmt: skip
        (self._accumulating if accumulates else self._bound)[strides] = stage
        return stage


class Round:
    """One stage of each of several movements."""

    def __init__(
        self, wire: Transport, movements: tuple[Movement, ...], depth: int, signature: Signature
    ) -> None:
        self.wire = wire
        self.signature = signature
        self.parts = [
            _Part(movement, *movement.steps[depth], i)
            for i, movement in enumerate(movements)
            if depth < len(movement.steps)
        ]
        self.communicates = any(part.stage.communicates for part in self.parts)

    def run(self, blocks: Blocks) -> None:
        """Replace the blocks of the movements by their outputs; ``None`` where there is none."""
        if not self.wire.packs:
            self._run_plain(blocks)
            return
        calls: list[StageCall] = []
        outputs: Blocks = []
        for part in self.parts:
            y = part.output()
            call = part.call(blocks[part.index], y, False)
            if call is not None:
                calls.append(call)
            outputs.append(y)
        if self.communicates:
            self.wire.run_stages(self.signature, calls)
        else:
            for call in calls:
                self.wire.run_local_stage(call)
        for part, y in zip(self.parts, outputs, strict=True):
            blocks[part.index] = y

    def start(self, blocks: Blocks, into: Blocks) -> InFlight:
        """Send the blocks on their way; see :func:`~gpudist.exchange.start`."""
        packs = self.wire.packs and all(y is None or y.is_contiguous() for y in into)
        if not (packs and self.communicates):
            return self._complete(blocks, into)
        calls: list[StageCall] = []
        outputs: Blocks = []
        numbers: dict[int, int] = {}
        for part, x, y in zip(self.parts, blocks, into, strict=True):
            outputs.append(part.output(y))
            call = part.call(x, outputs[-1], y is not None)
            if call is not None:
                numbers[part.index] = len(calls)
                calls.append(call)
        stages = self.wire.start_stages(self.signature, calls)
        return InFlight(outputs, self.wire, self.signature.label, stages, numbers, (blocks, calls))

    def _complete(self, blocks: Blocks, into: Blocks) -> InFlight:
        results = list(blocks)
        self.run(results)
        for i, (result, target) in enumerate(zip(results, into, strict=True)):
            if target is not None and result is not None:
                results[i] = target.add_(result)
        return InFlight(results, self.wire)

    @torch.no_grad()
    def _run_plain(self, blocks: Blocks) -> None:
        """By a transport that only carries messages."""
        arrivals = [[] for _ in self.parts]
        if self.communicates:
            with self.wire.group(self.signature):
                arrivals = [
                    post(part.stage, part.partition, part.movement, blocks[part.index])
                    for part in self.parts
                ]
        for part, arrived in zip(self.parts, arrivals, strict=True):
            x = blocks[part.index]
            blocks[part.index] = finish(part.stage, part.partition, part.movement, x, arrived)
