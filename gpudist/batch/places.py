"""New memory for the tensors of a batch, one after the other in one piece, and the tensors in it.

They share their memory with one another and with nothing else: it is new, or recycled, at every
call, and goes when the last of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack

from gpudist import recycling
from gpudist.batch.header import aligned
from gpudist.batch.values import TensorSpec

try:
    import gpudist._native as _native
except ImportError:
    _native = None

_NATIVE_DTYPES = {getattr(torch, dtype.name): dtype for dtype in _native.Dtype} if _native else {}


class Places:
    """Where tensors are to lie, each aligned, from the beginning of some memory.

    Attributes:
        nbytes: of the memory.
        sizes, rooms: bytes of each tensor, and up to where the next one may begin.
        offsets: of each tensor.
    """

    def __init__(self, like: Sequence[torch.Tensor | TensorSpec]) -> None:
        self._like = like
        self.sizes = [x.nbytes for x in like]
        self.rooms = [aligned(size) for size in self.sizes]
        *self.offsets, self.nbytes = accumulate(self.rooms, initial=0)

    def pieces(self, addresses: Sequence[int]) -> list[tuple[int, int]]:
        """Address and size of each tensor that has any bytes."""
        return [piece for piece in zip(addresses, self.sizes, strict=True) if piece[1]]

    def new_tensors(self, nbytes: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """New memory of at least ``nbytes`` on the CPU, of undefined content; the tensors in it.

        They are no views for torch, so that one may be changed in place while autograd keeps
        another.
        """
        dtypes = [_NATIVE_DTYPES[x.dtype] for x in self._like if x.dtype in _NATIVE_DTYPES]
        if _native is None or len(dtypes) < len(self._like):
            payload = recycling.empty((nbytes,), torch.uint8)
            return payload, tensors_in(self._like, payload)
        memory = _native.SharedMemory(nbytes, nbytes >= recycling.THRESHOLD_BYTES)
        capsules = memory.tensors(
            [_native.Dtype.uint8, *dtypes], [(nbytes,), *[x.shape for x in self._like]],
            [0, *self.offsets],
        )  # fmt: skip
        payload, *tensors = [from_dlpack(capsule) for capsule in capsules]
        return payload, tensors


def tensors_in(
    like: Sequence[torch.Tensor | TensorSpec], payload: torch.Tensor
) -> list[torch.Tensor]:
    """Tensors like these at their places in the memory of ``payload``; no views for torch."""
    storage, device = payload.untyped_storage(), payload.device
    start = payload.storage_offset()
    tensors: list[torch.Tensor] = []
    for each, offset in zip(like, Places(like).offsets, strict=True):
        x = torch.empty(0, dtype=each.dtype, device=device)
        x.set_(storage, (start + offset) // each.dtype.itemsize, each.shape)  # pyright: ignore
        tensors.append(x)
    return tensors
