"""Distances between vectors, and the cross product."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpudist.geometry.layout import broadcast, split
from gpudist.sbp.call import Call
from gpudist.sbp.registry import AxisPart, SbpSignature, compose, register
from gpudist.sbp.signatures.elementwise import align_attribute, splits


@compose(torch.dist, Tensor.dist)
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(input - other, p)


@compose(torch.pairwise_distance)
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@compose(torch.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    x1, x2 = (x if x.shape == shape else x.expand(shape) for x in (x1, x2))
    sizes = [torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps) for x in (x1, x2)]
    return (x1 / sizes[0] * (x2 / sizes[1])).sum(dim)


@register(torch.cdist, any_cuts=True)
def cdist(call: Call, parts: int) -> list[SbpSignature]:
    """Split the rows of either tensor, or batch dims."""
    left, right = call.shapes
    result = call.outputs[0].shape
    dims = len(result)
    batch = [
        SbpSignature(
            tuple(align_attribute(shape[:-2], d, result[:-2]) for shape in call.shapes), (split(d),)
        )
        for d in range(dims - 2)
    ]
    return [
        *batch,
        SbpSignature((split(len(left) - 2), broadcast), (split(dims - 2),)),
        SbpSignature((broadcast, split(len(right) - 2)), (split(dims - 1),)),
    ]


@register(torch.cross, Tensor.cross, torch.linalg.cross, any_cuts=True)
def cross(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims except the one with the three coordinates."""
    shape = call.outputs[0].shape
    dim = call.get(2, "dim")
    if dim is None:
        dim = -1 if call.function is torch.linalg.cross else shape.index(3)
    dim = dim % len(shape)
    # Name the dim explicitly: a block may have three cells along an earlier dim.
    localize = partial(_with_dim, dim)
    signatures = (replace(signature, localize=localize) for signature in splits(call))
    return [signature for signature in signatures if signature.outputs[0] != split(dim)]


def _with_dim(dim: int, call: Call, part: AxisPart) -> Call:
    return call.with_argument(2, "dim", dim)
