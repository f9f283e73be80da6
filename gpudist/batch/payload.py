"""Pack the tensors of a batch into one block of memory, each aligned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from gpudist import recycling
from gpudist.batch.header import ALIGNMENT_BYTES, aligned
from gpudist.batch.leaves import TensorSpec
from gpudist.batch.places import tensors_in

try:
    import gpudist._native as _native
except ImportError:
    _native = None

# Payloads are rounded up to one of this many sizes per power of two, so that few sizes are planned,
# however much the lengths of batches vary.
_SIZES_PER_OCTAVE = 8
_NATIVE_DIMS = 8
_CPU = torch.device("cpu")


def payload_bytes(tensors: Sequence[torch.Tensor | TensorSpec]) -> int:
    """Return the size of the tensors packed one after the other, each aligned."""
    return sum([aligned(x.nbytes) for x in tensors])


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
    if all([x.is_contiguous() for x in tensors]):
        if copies:
            torch._foreach_copy_(list(copies), list(tensors))
        return
    for x, copy in zip(tensors, copies, strict=True):
        if x.is_contiguous() or not _gather(x, copy):
            copy.copy_(x)


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides: list[int] = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return strides[::-1]


def _gather(x: torch.Tensor, target: torch.Tensor) -> bool:
    fits = x.device == target.device == _CPU and 0 < x.dim() <= _NATIVE_DIMS and x.numel()
    if _native is None or not fits or x.is_conj() or x.is_neg():
        return False
    stage = _copy_of(tuple(x.shape), x.stride(), x.dtype.itemsize)
    _native.run_local(stage, x.data_ptr(), target.data_ptr())
    return True


@lru_cache(maxsize=256)
def _copy_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
    """Return the native stage that copies items of this size from strided to contiguous memory."""
    assert _native is not None
    dtypes = {
        1: _native.Dtype.uint8, 2: _native.Dtype.int16, 4: _native.Dtype.int32,
        8: _native.Dtype.int64, 16: _native.Dtype.complex128,
    }  # fmt: skip
    whole = [0] * len(shape) + list(shape)
    count = 1
    for extent in shape:
        count *= extent
    return _native.BoundStage(
        dtype=dtypes[itemsize], input_strides=list(strides),
        output_strides=_contiguous_strides(shape), output_items=count, fill=0.0,
        starts_with_copy=False, same_cells=False, accumulates=False, fills=[],
        move_sources=[whole], move_destinations=[whole], sends=[], receives=[], sums=[],
        own_sources=[], relays=[], relayed=[],
    )  # fmt: skip
