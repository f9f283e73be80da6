"""Torch's current stream, and stages in flight on a separate stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


class StagesOnStream:
    """Bound stages on a separate stream.

    Args:
        join: makes the current stream wait for an event.
        event: event that completes with the stages.
    """

    def __init__(self, join: Callable[[int], None], event: int) -> None:
        self._join = join
        self._event: int | None = event

    def wait(self, call: int) -> None:
        """Make the current stream wait for all calls, which complete together."""
        if self._event is not None:
            event, self._event = self._event, None
            self._join(event)


def stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the handle of torch's current stream on ``device``."""
    if device.type != "cuda":
        return int  # 0
    current = torch._C._cuda_getCurrentRawStream
    return partial(current, device.index)
