"""Buckets: small tensors share a message, each large tensor has its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# Larger tensors are sent in place; smaller ones are first copied into one buffer.
COPIED_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


def messages(
    nbytes: Mapping[int, int], bucket_bytes: int = BUCKET_BYTES, copied_bytes: int = COPIED_BYTES
) -> list[list[int]]:
    """Return the keys of the tensors in each message: first the small ones, in order.

    Args:
        nbytes: size of each tensor in bytes, the same on all ranks of a message.
        bucket_bytes: maximum bytes of small tensors in one message, unless a single tensor is
            larger.
        copied_bytes: size of the largest tensor that is copied, in bytes.
    """
    buckets: list[list[int]] = []
    held = 0
    for i, size in nbytes.items():
        if size > copied_bytes:
            continue
        if not buckets or held + size > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += size
    return [*buckets, *([i] for i, size in nbytes.items() if size > copied_bytes)]


def concatenate_cells(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the cells of all tensors in one dim; a single contiguous tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
