"""Recycled memory for large tensors on a CPU: new pages cost several times the copy into them.

What a large tensor leaves behind is kept, up to a limit, and becomes the next tensor of about its
size. Memory is taken by size alone, so one pool serves the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch.utils.dlpack import from_dlpack

try:
    import gpudist._native as _native
except ImportError:
    _native = None

# Where the C library recycles as well and its blocks lie denser in the caches, it is level with the
# pool or up to 13 % ahead below this size, and behind from here on.
THRESHOLD_BYTES = 1 << 20

_CPU = torch.device("cpu")
_NATIVE_DTYPES = {getattr(torch, dtype.name): dtype for dtype in _native.Dtype} if _native else {}


@dataclass(frozen=True)
class Statistics:
    """What the pool of this process holds and has done.

    Attributes:
        in_use_bytes: of blocks that tensors are in.
        idle_bytes: of blocks kept for later tensors.
        hits: tensors that were given an idle block.
        misses: tensors that a new block was made for.
        limit_bytes: most that is kept idle.
    """

    in_use_bytes: int
    idle_bytes: int
    hits: int
    misses: int
    limit_bytes: int


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor of undefined content on the CPU, recycled if it is large.

    The memory goes back to the pool with the last tensor, view or array that shares it, in
    whichever thread. Unlike ``torch.empty``'s, it cannot grow: ``resize_`` to more bytes raises.

    Args:
        shape: extents in items.
        dtype: any; those the transports do not carry are never recycled.

    Cost:
        1 us where the pool has a block of the size's class, which is at most 1/8 larger.

    Raises:
        RuntimeError: torch's own: an extent is negative, or there is no memory, not even with the
            idle blocks given back.
    """
    native_dtype = _NATIVE_DTYPES.get(dtype)
    is_large = prod(shape) * dtype.itemsize >= THRESHOLD_BYTES
    if is_large and _native is not None and native_dtype is not None:
        try:
            return from_dlpack(_native.recycled_tensor(shape, native_dtype))
        except (MemoryError, ValueError):
            # torch fails too, and says at what.
            pass
    return torch.empty(shape, dtype=dtype, device=_CPU)


def maker(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """What makes tensors like :func:`empty`, on any device: quicker where many are alike."""
    if device.type == "cpu" and prod(shape) * dtype.itemsize >= THRESHOLD_BYTES:
        return partial(empty, tuple(shape), dtype)
    # From another tensor is half as dear as from a shape, a dtype and a device.
    like = torch.empty((), dtype=dtype, device=device).expand(tuple(shape))
    return partial(torch.empty_like, like, memory_format=torch.contiguous_format)


def empty_cache() -> None:
    """Give the idle blocks of this process back to the system."""
    if _native is not None:
        _native.empty_recycling_pool()


def set_limit(limit_bytes: int) -> None:
    """Bound what this process keeps idle; with 0, all large tensors are in new pages, huge ones.

    Blocks beyond the limit are given back at once, the least recently used first. The limit at
    first is 1 GiB, or a quarter of the memory if that is less.

    Raises:
        ValueError: the limit is negative.
    """
    if limit_bytes < 0:
        raise ValueError(f"a limit is 0 bytes or more, not {limit_bytes}")
    if _native is not None:
        _native.set_recycling_limit(limit_bytes)


def statistics() -> Statistics:
    """What the pool of this process holds and has done; zeros without the native core."""
    if _native is None:
        return Statistics(0, 0, 0, 0, 0)
    return Statistics(*_native.recycling_statistics())
