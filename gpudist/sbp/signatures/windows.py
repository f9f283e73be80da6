"""Convolutions: blocks of spatial dims with the cells around that their windows read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gpudist.autograd import is_eager
from gpudist.nn.autocast import autocast_is_on
from gpudist.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.ops.agreement import Layout
from gpudist.sbp.attributes import broadcast, partial_sum, split
from gpudist.sbp.registry import Bind, Call, Compute, Signature, Where, name_of, register

CONVOLUTIONS: dict[int, Any] = {1: DistributedConv1d, 2: DistributedConv2d, 3: DistributedConv3d}


def windowed(call: Call, dim: int, bind: Bind, sizes: tuple[int, ...] | None = None) -> Signature:
    """The first tensor and the result split in samples or in a spatial dim, all others copied.

    Blocks of a spatial dim of the result are balanced, whatever those of the input are.
    """
    others = (broadcast,) * (len(call.tensors) - 1)
    inputs, outputs = (split(dim, sizes), *others), (split(dim, None if dim else sizes),)
    return Signature(inputs, outputs, None, None, partial(windowed, call, dim, bind), bind, False)


def layout_of(where: Where, slot: int = 0) -> tuple[Any, Layout]:
    """The partition that a layer of ``gpudist.nn`` has for a tensor, and its blocks on it."""
    P, blocks = where.cut(slot)
    spec = where.call.tensors[slot]
    return P, Layout(str(where.call.function), P.shape, spec.dtype, blocks)


def given_numbers(value: Any, dims: int) -> tuple[int, ...]:
    """One number a dim, of what torch takes as one number or several."""
    if isinstance(value, (tuple, list)):
        return tuple(int(n) for n in value) * (dims if len(value) == 1 else 1)
    return (int(value),) * dims


@register(torch.conv1d, torch.conv2d, torch.conv3d, any_cuts=True, windows=True)
def convolution(call: Call, parts: int) -> list[Signature]:
    """Splits of samples, of spatial dims, and of channels where they are not in groups."""
    x, weight = call.tensors[:2]
    require_samples(call, x.dims == weight.dims)
    found = [windowed(call, dim, _bind_convolution) for dim in (0, *range(2, x.dims))]
    if call.get(6, "groups", 1) == 1:
        found += filter(None, [_outputs(call)]) if weight.shape[0] >= parts else []
        found += filter(None, [_inputs()]) if len(call.tensors) == 2 and x.shape[1] >= parts else []
    return found + (linear_in_each(2) if len(call.tensors) == 2 else [])


def _outputs(call: Call, sizes: tuple[int, ...] | None = None) -> Signature | None:
    """Some output channels on each worker; none of them is without."""
    if sizes is not None and not min(sizes):
        return None
    parameters = (split(0, sizes),) * (len(call.tensors) - 1)
    return Signature((broadcast, *parameters), (split(1, sizes),), recut=partial(_outputs, call))


def _inputs(sizes: tuple[int, ...] | None = None) -> Signature | None:
    """Some input channels on each worker, which give terms of all outputs."""
    if sizes is not None and not min(sizes):
        return None
    return Signature((split(1, sizes), split(1, sizes)), (partial_sum,), recut=_inputs)


def linear_in_each(count: int) -> list[Signature]:
    """A product of ``count`` tensors: terms of one of them give terms."""
    return [
        Signature(tuple(partial_sum if i == k else broadcast for i in range(count)), (partial_sum,))
        for k in range(count)
    ]


def require_samples(call: Call, has_samples: bool) -> None:
    """Leave a tensor without a dim of samples to whoever does not need a rule."""
    if not has_samples:
        raise NotImplementedError(
            f"{name_of(call.function)} of global tensors takes a dim of samples: x.unsqueeze(0)"
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
        given_numbers(call.get(3, "stride", 1), dims),
        padding if isinstance(padding, str) else given_numbers(padding, dims),
        given_numbers(call.get(5, "dilation", 1), dims),
        call.get(6, "groups", 1),
        len(call.tensors) > 2,
        device="meta",
        replicate_parameters=True,
    )
    return LayerOfShape(layer, layout).convolve


class LayerOfShape:
    """A layer of ``gpudist.nn`` for one layout of its input, with parameters that it is given."""

    def __init__(self, layer: Any, layout: Layout) -> None:
        self.layer, self.layout = layer, layout
        self.bound: Any = None

    def convolve(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        x, weight, *biases = tensors
        bias = biases[0] if biases else None
        if self.bound is None:
            self.bound = self.layer._bind(self.layout, x)
        if self.bound.in_place is not None and is_eager(x) and not autocast_is_on(x.device):
            return self.bound.in_place(x, weight, bias)
        return self.layer._compose(self.bound, x, weight, bias)
