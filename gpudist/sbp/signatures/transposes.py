"""Permutations of dims: ``transpose``, ``permute``, ``movedim``, ``t``, ``x.T`` and others."""

from __future__ import annotations

from torch import Tensor

from gpudist.sbp.call import Call, Function
from gpudist.sbp.registry import SbpSignature, forms, register
from gpudist.sbp.signatures.slicing import splits_of_full_dims


def order(call: Call) -> list[int]:
    """Return the input's dim for each dim of the result."""
    extents = tuple(range(2, 2 + call.tensors[0].dims))
    return [extent - 2 for extent in call.with_shapes([extents]).outputs[0].shape]


PROPERTIES: list[Function] = [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")]


@register(
    *forms("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint"),
    *PROPERTIES,
    any_cuts=True,
)
def transpose(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split moves with its dim."""
    dims = order(call)
    return splits_of_full_dims(dims, range(len(dims)))
