"""Convolutions: blocks of spatial dims fetch the neighbouring cells that their windows read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from gpudist.geometry.layout import broadcast, partial_sum, split
from gpudist.nn.affine.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.affine.conv_layer import ConvLayer
from gpudist.nn.affine.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from gpudist.nn.affine.conv_transpose_block import transpose_block
from gpudist.nn.affine.local_conv import convolve_block, number_per_dim
from gpudist.nn.autocast import in_product_dtype
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.sbp.call import Call, Compute, on_parts
from gpudist.sbp.registry import AxisPart, Bind, SbpSignature, Where, compose, name_of, register
from gpudist.sbp.signatures.contractions import linear_in_each

on_parts.update(dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), convolve_block))
on_parts.update(
    dict.fromkeys(
        (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), transpose_block
    )
)
CONVOLUTIONS: dict[int, Any] = {1: DistributedConv1d, 2: DistributedConv2d, 3: DistributedConv3d}
TRANSPOSED: dict[int, Any] = {
    1: DistributedConvTranspose1d,
    2: DistributedConvTranspose2d,
    3: DistributedConvTranspose3d,
}


def window_signature(call: Call, dim: int, bind: Bind) -> SbpSignature:
    """Return the signature that splits input and result in samples or in a spatial dim.

    All other tensors are copies. The result is balanced along a spatial dim, whatever the blocks of
    the input are.
    """
    inputs = (split(dim), *(broadcast,) * (len(call.tensors) - 1))
    cuts: Literal["all", "inputs"] = "inputs" if dim else "all"
    return SbpSignature(inputs, (split(dim),), bind=bind, nests=False, cuts=cuts)


def layout_of(where: Where) -> tuple[Any, BlockLayout]:
    """Return the partition of a ``gpudist.nn`` layer for a tensor, and the tensor's blocks."""
    P, blocks = where.cut(0)
    spec = where.call.tensors[0]
    return P, BlockLayout(str(where.call.function), P.shape, spec.dtype, blocks)


@register(torch.conv1d, torch.conv2d, torch.conv3d, any_cuts=True, windows=True)
def convolution(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples, spatial dims, and channels or groups."""
    x, weight = call.tensors[:2]
    require_samples(call, x.dims == weight.dims)
    groups = call.get(6, "groups", 1)
    _require_channels(call, weight.shape[1] * groups, weight.shape[0], f" and groups={groups} need")
    signatures = [window_signature(call, dim, _bind_convolution) for dim in (0, *range(2, x.dims))]
    return signatures + _channels(call, parts, groups, (0, 1))


def _require_channels(call: Call, channels: int, results: int, need: str = " needs") -> None:
    """Raise as torch's kernels do; its functions of shapes take a bias of any one."""
    x, weight, *biases = call.shapes
    if x[1] != channels:
        raise RuntimeError(
            f"the input has {x[1]} channels; a weight of shape {list(weight)}{need} {channels}"
        )
    if not results or results % call.get(6, "groups", 1) or biases not in ([], [(results,)]):
        raise RuntimeError(
            f"a weight of shape {list(weight)} makes {results} channels, which must be a multiple "
            f"of the groups, and the number of values of a bias: {[list(bias) for bias in biases]}"
        )


def _channels(
    call: Call, parts: int, groups: int, weight_dims: tuple[int, int]
) -> list[SbpSignature]:
    """Return splits of channels, or of whole groups, and terms of one factor.

    Args:
        call: call of the convolution.
        parts: number of workers along the axis.
        groups: number of groups.
        weight_dims: dims of the weight with the output channels and with the input channels.
    """
    outputs, inputs = weight_dims
    weight, has_bias = call.tensors[1], len(call.tensors) > 2
    signatures = [] if has_bias else linear_in_each(2)
    if groups > 1 and groups % parts == 0:
        signatures.append(_whole_groups(call, groups // parts))
    if groups == 1 and weight.shape[outputs] >= parts:
        biases = (split(0),) * has_bias
        ends = (broadcast, split(outputs), *biases), (split(1),)
        signatures.append(SbpSignature(*ends, cuts="all", takes_empty=False))
    if groups == 1 and weight.shape[inputs] >= parts:
        ends = (split(1), split(inputs), *(partial_sum,) * has_bias), (partial_sum,)
        # A bias is in terms where a plan splits the weight. To leave the result in terms costs more
        # than to move an input with split channels.
        signatures.append(SbpSignature(*ends, cuts="all", takes_empty=False, only_unboxed=has_bias))
    return signatures


def _whole_groups(call: Call, groups: int) -> SbpSignature:
    parameters = (split(0),) * (len(call.tensors) - 1)

    def localize(call: Call, part: AxisPart) -> Call:
        return call.with_argument(6, "groups", groups)

    return SbpSignature((split(1), *parameters), (split(1),), localize, recut=lambda sizes: None)


def require_samples(call: Call, has_samples: bool) -> None:
    """Raise if the tensor has no dim of samples.

    Raises:
        NotImplementedError: the dim is missing; a converted network then computes the function on
            the full tensor.
    """
    if not has_samples:
        raise NotImplementedError(
            f"{name_of(call.function)} of a global tensor: the dim of samples is missing; add it "
            "with x.unsqueeze(0)"
        )


def _bind_convolution(call: Call, where: Where) -> Compute:
    x, weight = call.shapes[:2]
    dims = len(weight) - 2
    padding = call.get(4, "padding", 0)
    P, layout = layout_of(where)
    layer = CONVOLUTIONS[dims](
        P,
        x[1],
        weight[0],
        weight[2:],
        number_per_dim(call.get(3, "stride", 1), dims),
        padding if isinstance(padding, str) else number_per_dim(padding, dims),
        number_per_dim(call.get(5, "dilation", 1), dims),
        call.get(6, "groups", 1),
        len(call.tensors) > 2,
        device="meta",
        replicate_parameters=True,
    )
    return LayerOfShape(layer, layout)


@register(
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    any_cuts=True,
    windows=True,
)
def transposed_convolution(call: Call, parts: int) -> list[SbpSignature]:
    """Split like a convolution; output channels are the weight's second dim."""
    x, weight = call.tensors[:2]
    require_samples(call, x.dims == weight.dims)
    groups = call.get(6, "groups", 1)
    _require_channels(call, weight.shape[0], weight.shape[1] * groups)
    signatures = [window_signature(call, dim, _bind_transposed) for dim in (0, *range(2, x.dims))]
    return signatures + _channels(call, parts, groups, (1, 0))


def _bind_transposed(call: Call, where: Where) -> Compute:
    x, weight = call.shapes[:2]
    dims, groups = len(weight) - 2, call.get(6, "groups", 1)
    P, layout = layout_of(where)
    layer = TRANSPOSED[dims](
        P,
        x[1],
        weight[1] * groups,
        weight[2:],
        number_per_dim(call.get(3, "stride", 1), dims),
        number_per_dim(call.get(4, "padding", 0), dims),
        number_per_dim(call.get(5, "output_padding", 0), dims),
        groups,
        len(call.tensors) > 2,
        number_per_dim(call.get(7, "dilation", 1), dims),
        device="meta",
        replicate_parameters=True,
    )
    return LayerOfShape(layer, layout)


@compose(torch.convolution)
def any_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> torch.Tensor:
    """Call the convolution with the arguments in the order of ``torch.convolution``."""
    function = getattr(torch, f"conv{'_transpose' * transposed}{weight.dim() - 2}d")
    more = (output_padding, groups, dilation) if transposed else (dilation, groups)
    return function(x, weight, bias, stride, padding, *more)


class LayerOfShape:
    """A layer of ``gpudist.nn`` for one layout of its input; calls pass the parameters."""

    def __init__(self, layer: ConvLayer, layout: BlockLayout) -> None:
        self.layer, self.layout = layer, layout
        self.bound: Any = None
        # Convolution of the block alone, if no communication is needed.
        self.alone: Any = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.alone is not None:
            return self.alone(*tensors)
        x, weight, *biases = tensors
        x = in_product_dtype(x)
        if self.bound is None:
            self.bound = self.layer.bind(self.layout.with_extents({}, x.dtype), x)
            self.alone = self.bound.alone
        return self.layer.convolve(self.bound, x, weight, biases[0] if biases else None)
