"""Torch's streams, and what is under way on one beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


class StagesOnStream:
    """Bound stages on a stream of their own.

    Args:
        join: lets the current stream wait for an event.
        event: complete when they are.
    """

    def __init__(self, join: Callable[[int], None], event: int) -> None:
        self._join = join
        self._event: int | None = event

    def wait(self, call: int) -> None:
        """All calls are complete together: what follows on the current stream comes after them."""
        if self._event is not None:
            event, self._event = self._event, None
            self._join(event)


def stream_of(device: torch.device) -> Callable[[], int]:
    """What returns the handle of torch's current stream on ``device``."""
    if device.type != "cuda":
        return lambda: 0
    current = torch._C._cuda_getCurrentRawStream
    return partial(current, device.index)
