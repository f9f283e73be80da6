"""Which tensors travel in one message: the small ones copied together, each large one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# Larger tensors are sent from where they are; smaller ones are copied together first.
COPIED_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


def messages(
    nbytes: Mapping[int, int], bucket_bytes: int = BUCKET_BYTES, copied_bytes: int = COPIED_BYTES
) -> list[list[int]]:
    """The tensors that go together, by their keys in ``nbytes``: first the small ones, in order.

    Args:
        nbytes: of each tensor, the same on all ranks of a message.
        bucket_bytes: the most of small tensors in one message, unless one alone is larger.
        copied_bytes: of the largest tensor that is copied.
    """
    found: list[list[int]] = []
    held = 0
    for i, size in nbytes.items():
        if size > copied_bytes:
            continue
        if not found or held + size > bucket_bytes:
            found.append([])
            held = 0
        found[-1].append(i)
        held += size
    return [*found, *([i] for i, size in nbytes.items() if size > copied_bytes)]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The cells of all of them in one dim; no copy of a contiguous one alone."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
