"""Memory pool for large CPU tensors: mapping new pages costs several times the copy into them.

Freed memory of large tensors is cached, up to a limit, and reused for tensors of about the same
size. Blocks are chosen by size alone, so one pool serves the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch.utils.dlpack import from_dlpack

from gpudist.native import native as _native

# The C library caches smaller blocks too, and packs them more densely. Below this size it is as
# fast as the pool or up to 13 % faster; from here on it is slower.
THRESHOLD_BYTES = 1 << 20

_CPU = torch.device("cpu")
_NATIVE_DTYPES = {getattr(torch, dtype.name): dtype for dtype in _native.Dtype} if _native else {}


@dataclass(frozen=True)
class Statistics:
    """Statistics of the memory pool of this process.

    Attributes:
        in_use_bytes: size of all blocks that hold tensors.
        idle_bytes: size of all blocks cached for later tensors.
        hits: number of tensors that reused an idle block.
        misses: number of tensors that needed a new block.
        limit_bytes: largest allowed ``idle_bytes``.
    """

    in_use_bytes: int
    idle_bytes: int
    hits: int
    misses: int
    limit_bytes: int


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized contiguous CPU tensor, from the memory pool if it is large.

    The memory returns to the pool when the last tensor, view or array that shares it is freed, in
    any thread. Unlike a tensor of ``torch.empty``, it cannot grow: ``resize_`` to more bytes
    raises.

    Args:
        shape: shape in items.
        dtype: any dtype; only those that the transports carry use the pool.

    Returns:
        New tensor of shape ``shape``.

    Cost:
        1 us if the pool has a block of the same size class, which is at most 1/8 larger.

    Raises:
        RuntimeError: raised by torch if an extent is negative, or if there is not enough memory
            even after freeing the idle blocks.
    """
    native_dtype = _NATIVE_DTYPES.get(dtype)
    is_large = prod(shape) * dtype.itemsize >= THRESHOLD_BYTES
    if is_large and _native is not None and native_dtype is not None:
        try:
            return from_dlpack(_native.recycled_tensor(shape, native_dtype))
        except (MemoryError, ValueError):
            # torch.empty also fails, with a clear message.
            pass
    return torch.empty(shape, dtype=dtype, device=_CPU)


def maker(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a function that creates tensors like :func:`empty`, on any device.

    Faster than :func:`empty` for many tensors of equal shape and dtype.
    """
    if prod(shape) * dtype.itemsize < THRESHOLD_BYTES:
        # empty_like takes half the time of empty with a shape, a dtype and a device. What it is
        # like needs no memory.
        like = torch.empty(tuple(shape), dtype=dtype, device=device)
        like.untyped_storage().resize_(0)
        return partial(torch.empty_like, like)
    if device.type == "cpu":
        return partial(empty, tuple(shape), dtype)
    # One item, because there may be no memory for another tensor. The result is contiguous.
    return partial(torch.empty_like, torch.empty(1, dtype=dtype, device=device).expand(*shape))


def empty_cache() -> None:
    """Free the idle blocks of this process's memory pool."""
    if _native is not None:
        _native.empty_recycling_pool()


def set_limit(limit_bytes: int) -> None:
    """Limit the idle memory of this process's pool; 0 disables caching.

    Idle blocks beyond the limit are freed immediately, least recently used first. The default is
    1 GiB, or a quarter of the memory if that is less. Without caching, every large tensor uses
    newly mapped huge pages.

    Args:
        limit_bytes: largest total size of idle blocks, in bytes.

    Raises:
        ValueError: ``limit_bytes`` is negative.
    """
    if limit_bytes < 0:
        raise ValueError(f"set_limit: limit_bytes is {limit_bytes}; it must be at least 0")
    if _native is not None:
        _native.set_recycling_limit(limit_bytes)


def statistics() -> Statistics:
    """Return statistics of this process's memory pool; all zero without the native core."""
    if _native is None:
        return Statistics(0, 0, 0, 0, 0)
    return Statistics(*_native.recycling_statistics())
