"""Movements in flight, until they are waited for."""

from __future__ import annotations

import torch

from gpudist.errors import TransportError
from gpudist.transport.base import StagesInFlight, Transport
from gpudist.transport.failure.channel import Failure

Blocks = list[torch.Tensor | None]


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
