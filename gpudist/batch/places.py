"""Pack the tensors of a batch into one piece of memory, each aligned.

The tensors share this memory with one another and with nothing else. Every call allocates new or
recycled memory, which is freed together with the last of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack

from gpudist import recycling
from gpudist.batch.header import round_up
from gpudist.batch.leaves import TensorSpec
from gpudist.native import native as _native

_CPU = torch.device("cpu")
_NATIVE_DTYPES = {getattr(torch, dtype.name): dtype for dtype in _native.Dtype} if _native else {}


class Places:
    """Places of tensors, each aligned, from the start of a piece of memory.

    Attributes:
        nbytes: size of the memory.
        sizes, rooms: bytes of each tensor, and bytes until the next one may begin.
        offsets: offset of each tensor in bytes.
    """

    def __init__(self, like: Sequence[torch.Tensor | TensorSpec]) -> None:
        self._like = like
        self.sizes = [x.nbytes for x in like]
        self.rooms = [round_up(size) for size in self.sizes]
        *self.offsets, self.nbytes = accumulate(self.rooms, initial=0)

    def new_tensors(self, device: torch.device = _CPU) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Allocate uninitialised memory; return it and the tensors in it.

        For torch the tensors are not views, so that one may be changed in place while autograd
        keeps another.
        """
        if device.type != "cpu":
            payload = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            return payload, tensors_in(self._like, payload)
        dtypes = [_NATIVE_DTYPES[x.dtype] for x in self._like if x.dtype in _NATIVE_DTYPES]
        if _native is None or len(dtypes) < len(self._like):
            payload = recycling.empty((self.nbytes,), torch.uint8)
            return payload, tensors_in(self._like, payload)
        memory = _native.SharedMemory(self.nbytes, self.nbytes >= recycling.THRESHOLD_BYTES)
        capsules = memory.tensors(
            [_native.Dtype.uint8, *dtypes], [(self.nbytes,), *[x.shape for x in self._like]],
            [0, *self.offsets],
        )  # fmt: skip
        payload, *tensors = [from_dlpack(capsule) for capsule in capsules]
        return payload, tensors

    def copy(self, device: torch.device = _CPU) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy the tensors into new memory; return it and the copies."""
        payload, copies = self.new_tensors(device)
        copy_into(copies, self._like)  # pyright: ignore
        return payload, copies


def tensors_in(
    like: Sequence[torch.Tensor | TensorSpec], payload: torch.Tensor
) -> list[torch.Tensor]:
    """Tensors shaped like ``like`` in the memory of ``payload``; for torch they are not views."""
    storage, device = payload.untyped_storage(), payload.device
    start = payload.storage_offset()
    tensors: list[torch.Tensor] = []
    for each, offset in zip(like, Places(like).offsets, strict=True):
        x = torch.empty(0, dtype=each.dtype, device=device)
        x.set_(storage, (start + offset) // each.dtype.itemsize, each.shape)  # pyright: ignore
        tensors.append(x)
    return tensors


@torch.no_grad()
def copy_into(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each of ``tensors`` into the contiguous tensor of ``copies`` at the same position."""
    if copies:
        torch._foreach_copy_(list(copies), list(tensors))
