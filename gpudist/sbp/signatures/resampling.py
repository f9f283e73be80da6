"""Interpolation: blocks of spatial dims fetch the neighbouring cells that their outputs read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import partial_sum
from gpudist.nn.windowed.upsample import DistributedUpsample
from gpudist.sbp.call import Call, Compute, on_meta
from gpudist.sbp.registry import SbpSignature, Where, register
from gpudist.sbp.signatures.block_layers import LayerAlongLast, along_last, bind_along_last

_NEAREST = ("nearest", "nearest-exact")


@register(F.interpolate, any_cuts=True)
def interpolate(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims, or only samples and channels for modes without a layer in gpudist."""
    x, dims = call.tensors[0], call.tensors[0].dims - 2
    is_float = x.dtype.is_floating_point
    signatures = along_last(call, partial(bind_along_last, dims, partial(_bind, dims)), dims)
    if call.get(6, "antialias", False) or not (is_float or _mode(call) in _NEAREST):
        signatures = signatures[:2]
    return [*signatures, SbpSignature((partial_sum,), (partial_sum,))] if is_float else signatures


def _interpolate_of_shapes(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.numel():
        return F.interpolate(x, *args, **kwargs)
    # Torch's decompositions refuse some tensors without cells that its kernels take.
    return F.interpolate(torch.empty(x.shape, dtype=x.dtype), *args, **kwargs).to("meta")


on_meta[F.interpolate] = _interpolate_of_shapes


def _mode(call: Call) -> str:
    return call.get(3, "mode", "nearest")


def _bind(dims: int, where: Where) -> Compute:
    return LayerAlongLast(where, dims, partial(_layer, where.call), "interpolate")


def _layer(call: Call, P: Any) -> DistributedUpsample:
    size, scale = call.get(1, "size"), call.get(2, "scale_factor")
    if isinstance(size, (list, tuple)):
        size = [int(n) for n in size]
    if isinstance(scale, (list, tuple)):
        scale = [float(s) for s in scale]
    aligned, again = call.get(4, "align_corners"), call.get(5, "recompute_scale_factor")
    return DistributedUpsample(P, size, scale, _mode(call), aligned, again)
