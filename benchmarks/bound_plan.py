"""A movement's one call into the transport, without the operator around it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpudist.exchange import Movement, _bind_stage, _signature


def one_call(movement: Movement, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Carry out the only stage of ``movement`` from ``x`` into existing memory ``y``."""
    wire = movement.steps[0].partition.wire
    signature = _signature((movement,), 0)
    calls = [(_bind_stage(movement, 0, x.stride()), x.data_ptr(), y.data_ptr())]

    def call() -> torch.Tensor:
        wire.run_stages(signature, calls)
        return y

    return call
