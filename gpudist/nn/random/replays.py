"""Numbers of the replays of CUDA graphs that draw random numbers."""

from __future__ import annotations

import torch

from gpudist.errors import GpudistError
from gpudist.native import native as _native
from gpudist.transport.nccl.streams import stream_of


class Replays:
    """Counts the replays of graphs on one GPU, in its memory.

    A graph repeats the host's numbers. The first draw in each graph therefore increments a counter,
    on which all draws in the graph depend. Create it before a capture begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._stream = stream_of(self._count.device)
        self._capture = 0

    def number(self) -> torch.Tensor | None:
        """Return the number of the current replay, or ``None`` if no graph is being captured."""
        capture = 0 if _native is None else _native.capture_id(self._stream())
        if capture == 0:
            return None
        if capture != self._capture:
            self._capture = capture
            self._count.add_(1)
        return self._count


def replays_on(device: torch.device, known: dict[torch.device, Replays]) -> Replays:
    """Return the counter of a GPU from ``known``, or create it."""
    replays = known.get(device)
    if replays is None:
        if torch.cuda.is_current_stream_capturing():
            raise GpudistError(
                "random numbers are drawn for the first time while a CUDA graph is captured: call "
                "the network once before"
            )
        replays = known[device] = Replays(device)
    return replays
