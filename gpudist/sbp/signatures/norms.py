"""Layer, RMS and group norm: blocks are normalized by the moments over all blocks.

If every statistic lies within one block, torch's function computes it. Otherwise the autograd node
that the layers of :mod:`gpudist.nn` use computes it, with one group of messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.boxes import Box
from gpudist.geometry.layout import Layout, Sbp, broadcast, split
from gpudist.nn.norm.kernels import never_fit
from gpudist.nn.norm.node import BlockNorm
from gpudist.nn.norm.normalization import Normalization
from gpudist.sbp.call import Call, Compute, Slot, on_meta
from gpudist.sbp.registry import AxisPart, Bind, Localize, SbpSignature, Where, register


def slots_of(call: Call, **positions: int) -> list[int | None]:
    """Return the numbers of the tensors that are these arguments, ``None`` if not given."""
    arguments = [call.get(position, name) for name, position in positions.items()]
    return [argument.number if isinstance(argument, Slot) else None for argument in arguments]


def alike(
    call: Call, d: int, others: Sbp, localize: Localize | None = None, bind: Bind | None = None
) -> SbpSignature:
    """Return the signature that splits input and result in ``d``; other tensors have ``others``."""
    inputs = (split(d), *(others,) * (len(call.tensors) - 1))
    return SbpSignature(inputs, (split(d),), localize, bind=bind)


def bind_normalization(by: Normalization, where: Where) -> Normalization:
    """Bind a normalization to this worker's block of the first tensor."""
    shape, sbp = where.call.shapes[0], where.sbps[0]
    blocks: Collection[Box] = ()
    if by.group_count:
        blocks = Layout(tuple(where.P.ranks), where.P.shape, sbp, shape).boxes.values()
    channels = [(box.start[1], box.stop[1]) for box in blocks]
    key = ("a global tensor", where.call.shapes, where.sbps)
    split_by = [attribute.dim for attribute in sbp]
    return by.bind(where.P, split_by, where.inputs[0], shape, channels, key)


def _bind_norm(by: Normalization, call: Call, where: Where, alone: Compute) -> Compute:
    # ``alone``: torch's kernel for a block that shares no statistics. Blocks may be of 16 bits.
    shape, dtype = call.tensors[0].shape, call.tensors[0].dtype
    if never_fit(by, shape, dtype, where.P.device):
        return alone
    return BlockNorm(by, slots_of(call, weight=2, bias=3), dtype)


# --- Layer norm: over the last dims -------------------------------------------------------------

LAYERS = {F.layer_norm: 1e-5, torch.layer_norm: 1e-5, F.rms_norm: None, torch.rms_norm: None}


@register(*LAYERS, any_cuts=True)
def layer_norm(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split of a normalized dim also splits the parameters."""
    dims = call.tensors[0].dims
    leading = dims - len(call.get(1, "normalized_shape"))
    normalized = [
        alike(call, leading + d, split(d), _block_of(d), _bind_layer) for d in range(dims - leading)
    ]
    return [*(alike(call, d, broadcast) for d in range(leading)), *normalized]


def _block_of(dim: int) -> Localize:
    def localize(call: Call, part: AxisPart) -> Call:
        shape = list(call.get(1, "normalized_shape"))
        start, stop = part.cells(shape[dim])
        shape[dim] = stop - start
        return call.with_argument(1, "normalized_shape", shape)

    return localize


def _bind_layer(call: Call, where: Where) -> Compute:
    x, cells = call.tensors[0], call.get(1, "normalized_shape")
    default = LAYERS[call.function]
    is_layer = default is not None
    eps = call.get(4 if is_layer else 3, "eps", default)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    dims = tuple(range(x.dims - len(cells), x.dims))
    by = bind_normalization(Normalization(dims, eps, is_layer, per_channel=False), where)
    # Without the Python function that calls it.
    alone = replace(call, function=torch.layer_norm) if is_layer else call
    return _bind_norm(by, call, where, alone.as_function)


# --- Group norm: over the channels of a group and all features ----------------------------------


@register(F.group_norm, torch.group_norm, any_cuts=True)
def group_norm(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples, channels, also within groups, or features."""
    # torch's function supports no blocks with parts of groups, or with one cell in all.
    splits = [
        alike(call, d, split(0) if d == 1 else broadcast, bind=_bind_groups)
        for d in range(call.tensors[0].dims)
    ]
    copies = SbpSignature((broadcast,) * len(call.tensors), (broadcast,), bind=_bind_groups)
    return [*(replace(signature, cuts="all") for signature in splits), copies]


def result_like(input: torch.Tensor, per_channel: Sequence[object] = ()) -> torch.Tensor:
    """Return the meta tensor of a norm of ``input``.

    Args:
        input: meta tensor.
        per_channel: parameters and moments, which have one cell per channel.

    Raises:
        RuntimeError: torch's function raises for these arguments.
    """
    if not input.is_floating_point():
        raise RuntimeError(f"a norm needs a floating dtype, not {input.dtype}")
    require_shape(input.shape[1:2], *per_channel)
    return torch.empty_like(input)


def require_shape(shape: Sequence[int], *parameters: Any) -> None:
    """Raise if a given weight, bias or running moment has another shape than the channels."""
    for x in parameters:
        if x is not None and tuple(getattr(x, "shape", ())) != tuple(shape):
            raise RuntimeError(
                f"the input has {' x '.join(map(str, shape))} channels; a weight, bias or running "
                f"moment has shape {list(getattr(x, 'shape', ()))}"
            )


def _group_norm_of_shapes(
    input: torch.Tensor, num_groups: int, *parameters: object, **named: object
) -> Any:
    channels = input.shape[1]
    if channels % num_groups:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {list(input.shape)} and num_groups={num_groups}"
        )
    named.pop("eps", None)
    return result_like(input, (*parameters[:2], *named.values()))


def _layer_norm_of_shapes(
    function: Any, input: torch.Tensor, normalized_shape: Sequence[int], *rest: Any, **named: Any
) -> Any:
    if tuple(input.shape[-len(normalized_shape) :]) != tuple(normalized_shape):
        return function(input, normalized_shape, *rest, **named)
    named.pop("eps", None)
    require_shape(normalized_shape, *rest[:2], *named.values())
    return result_like(input).contiguous()


for _function in (F.layer_norm, torch.layer_norm):
    on_meta[_function] = partial(_layer_norm_of_shapes, _function)
on_meta[F.group_norm] = on_meta[torch.group_norm] = _group_norm_of_shapes


def _bind_groups(call: Call, where: Where) -> Compute:
    groups, shape = call.get(1, "num_groups"), where.call.shapes[0]
    if call.function is F.group_norm and prod(shape) == groups:
        F.group_norm(torch.empty(shape, device="meta"), groups)  # Raises, on every rank alike.
    features, eps = tuple(range(2, call.tensors[0].dims)), call.get(4, "eps", 1e-5)
    by = bind_normalization(
        Normalization(features, eps, group_count=where.call.get(1, "num_groups")), where
    )
    # Unlike F.group_norm, torch's own does not require several values per group in the block.
    arguments = call.args[0], by.group_count, call.get(2, "weight"), call.get(3, "bias"), eps
    local = replace(call, function=torch.group_norm, args=arguments, kwargs={})
    return _bind_norm(by, call, where, local.as_function)


# --- Local response norm: over neighbouring channels --------------------------------------------


@register(F.local_response_norm, any_cuts=True)
def local_response_norm(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims except the channels."""
    return [alike(call, d, broadcast) for d in range(call.tensors[0].dims) if d != 1]
