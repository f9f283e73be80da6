"""Pack the tensors of a batch into one block of memory, each aligned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist import recycling
from gpudist.batch.header import ALIGNMENT_BYTES, round_up
from gpudist.batch.leaves import TensorSpec
from gpudist.batch.places import tensors_in

# Payloads are rounded up to one of this many sizes per power of two, so that few sizes are planned,
# however much the lengths of batches vary.
_SIZES_PER_OCTAVE = 8


def payload_bytes(tensors: Sequence[torch.Tensor | TensorSpec]) -> int:
    """Return the size of the tensors packed one after the other, each aligned."""
    return sum([round_up(x.nbytes) for x in tensors])


def message_bytes(nbytes: int) -> int:
    """Return the size of the message for ``nbytes`` bytes of payload, at most 1/8 more."""
    octave = 1 << max(0, nbytes.bit_length() - 1)
    step = max(ALIGNMENT_BYTES, octave // _SIZES_PER_OCTAVE)
    return -(-nbytes // step) * step


def new_payload(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uninitialised memory for a payload; large CPU memory is recycled."""
    if device.type == "cpu":
        return recycling.empty((nbytes,), torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def pack(tensors: Sequence[torch.Tensor], payload: torch.Tensor) -> list[torch.Tensor]:
    """Copy the tensors into ``payload``, one after the other, each aligned; return the copies."""
    copies = tensors_in(tensors, payload)
    copy_into(copies, tensors)
    return copies


@torch.no_grad()
def copy_into(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each of ``tensors`` into the contiguous tensor of ``copies`` at the same position."""
    if copies:
        torch._foreach_copy_(list(copies), list(tensors))
