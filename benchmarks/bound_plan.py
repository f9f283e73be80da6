"""The single transport call of a bound movement, without the operator around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpudist.exchange import Movement
from gpudist.exchange.carry import _common
from gpudist.transport.host.core_transport import CoreTransport, native_signature


def one_call(movement: Movement, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Execute the only stage of ``movement`` from ``x`` into existing memory ``y``."""
    wire = movement.steps[0].partition.wire
    assert isinstance(wire, CoreTransport)
    stage: Any = movement.steps[0].bind(x.stride())[0]
    calls = [(stage, x.data_ptr(), y.data_ptr())]
    signature, run = native_signature(_common((movement,), 0).signature), wire._core.run

    def call() -> torch.Tensor:
        run(signature, calls)
        return y

    return call
