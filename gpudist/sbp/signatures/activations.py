"""Activations that are not elementwise."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import broadcast, split
from gpudist.sbp.call import Call
from gpudist.sbp.registry import SbpSignature, compose, forms, register


@register(*forms("prelu"), any_cuts=True)
def prelu(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split of the channels also splits the slopes, unless there is only one."""
    x, slopes = call.shapes
    of_channels = split(0) if len(slopes) and slopes[0] > 1 else broadcast
    return [
        SbpSignature((split(d), of_channels if d == 1 else broadcast), (split(d),))
        for d in range(len(x))
    ]


@register(F.glu, any_cuts=True)
def glu(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims except the one that GLU halves."""
    dims = call.tensors[0].dims
    dim = call.get(1, "dim", -1) % max(dims, 1)
    return [SbpSignature((split(d),), (split(d),)) for d in range(dims) if d != dim]


@compose(F.normalize)
def normalize(
    input: torch.Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> torch.Tensor:
    return input / torch.linalg.vector_norm(input, p, dim, True).clamp_min(eps)
