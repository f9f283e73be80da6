"""Comparisons whose result is a bool, and search among values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.layout import broadcast, split
from gpudist.sbp.call import Call
from gpudist.sbp.registry import SbpSignature, compose, register


@register(torch.isin, torch.bucketize, any_cuts=True)
def among(call: Call, parts: int) -> list[SbpSignature]:
    """Split the first tensor; the others are copies."""
    shape = call.outputs[0].shape
    others = (broadcast,) * (len(call.tensors) - 1)
    if call.shapes[0] != shape:
        return []
    return [SbpSignature((split(d), *others), (split(d),)) for d in range(len(shape))]


@compose(torch.equal, Tensor.equal)
def equal(input: Tensor, other: Tensor) -> bool:
    return input.shape == other.shape and bool((input == other).all())


@compose(torch.allclose, Tensor.allclose)
def allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@compose(Tensor.__contains__)
def contains(x: Tensor, element: Any) -> bool:
    return bool((x == element).any())


@compose(torch.is_nonzero, Tensor.is_nonzero)
def is_nonzero(input: Tensor) -> bool:
    return bool(input)


@compose(torch.is_same_size, Tensor.is_same_size)
def is_same_size(input: Tensor, other: Tensor) -> bool:
    return input.shape == other.shape
