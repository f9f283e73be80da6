"""A communicator of one rank, whose messages go to itself: one GPU, with every NCCL, sends them.

A world of one copies its halos without NCCL. Over this communicator the same stage packs, sends,
receives and unpacks, and its last kernel reads the word of a failed world, as with several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.transport.nccl.streams import stream_of
from gpudist.transport.nccl.transport import _native
from gpudist.world.environment import describe
from gpudist.world.runtime import settings

TIMEOUT_S, CLOSING_S = 60.0, 10.0


class Itself:
    """The native core of one rank, beside the one of its world.

    Attributes:
        core: ``NcclWorld`` of the native module.
        stream: returns the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        nccl = describe().nccl
        assert _native is not None and nccl is not None
        self.core: Any = _native.NcclWorld(
            0, 1, device.index or 0, TIMEOUT_S, nccl.path, [], settings().device_library
        )
        self.core.connect(self.core.new_id(), [0])
        self.stream = stream_of(device)

    def native(self, members: Sequence[int]) -> Any:
        raise AssertionError(f"there is no communicator of {list(members)}, only the world's")


_made: list[Itself] = []


def itself(device: torch.device) -> Itself:
    """Return the communicator of this process, made at the first call."""
    if not _made:
        _made.append(Itself(device))
    return _made[0]


def end() -> None:
    """Close the communicator, if there is one."""
    while _made:
        _made.pop().core.close(CLOSING_S)
