"""Layer, RMS and group norm: blocks are normalized by the moments over all blocks.

If every statistic lies within one block, torch's function computes it. Otherwise the autograd node
that the layers of :mod:`gpudist.nn` use computes it, with one group of messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.exchange import Movement, bind
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.nn.norm.node import Normalized, normalize
from gpudist.nn.norm.normalization import Normalization
from gpudist.sbp.attributes import Sbp, broadcast, split
from gpudist.sbp.layout import Layout
from gpudist.sbp.registry import (
    AxisPart,
    Bind,
    Call,
    Compute,
    Localize,
    SbpSignature,
    Slot,
    Where,
    on_meta,
    register,
)
from gpudist.sbp.signatures.across import axes_that_split, some_are_empty, together_if


def tensor_at(
    call: Call, tensors: Sequence[torch.Tensor], position: int, name: str
) -> torch.Tensor | None:
    """Return the local tensor of an argument, ``None`` if it is not given."""
    given = call.get(position, name)
    return tensors[given.number] if isinstance(given, Slot) else None


def parameters_at(
    call: Call, tensors: Sequence[torch.Tensor], position: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the weight, at ``position``, and the bias after it."""
    weight = tensor_at(call, tensors, position, "weight")
    return weight, tensor_at(call, tensors, position + 1, "bias")


def no_movements(call: Call, position: int) -> tuple[None, ...]:
    """Return ``None`` for each parameter of :func:`normalize_block`: no parameter moves."""
    has_weight = isinstance(call.get(position, "weight"), Slot)
    has_bias = isinstance(call.get(position + 1, "bias"), Slot)
    return (None,) * (has_weight + (has_weight and has_bias))


def alike(
    call: Call, d: int, others: Sbp, localize: Localize | None = None, bind: Bind | None = None
) -> SbpSignature:
    """Return the signature that splits input and result in ``d``; other tensors have ``others``."""
    inputs = (split(d), *(others,) * (len(call.tensors) - 1))
    return SbpSignature(inputs, (split(d),), localize, bind=bind)


def bind_sum(where: Where, dims: Collection[int], shape: Sequence[int]) -> Movement | None:
    """Bind the all-reduce of tensors of ``shape`` over the workers that split ``dims``.

    Returns ``None`` if no other worker has a part.
    """
    P = where.P.along(axes_that_split(where, 0, dims))
    if P.size == 1:
        return None
    key = ("moments of a global tensor", P.digest, where.call.shapes, where.sbps, tuple(shape))
    assert P.rank is not None
    plan = plan_all_sum_reduce(P.rank, range(P.size), tuple(shape), key)
    return bind(plan, P, "moments of a global tensor", torch.float64, tuple(shape), torch.float64)


def normalize_block(
    normalization: Normalization,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Normalized:
    """Normalize ``x`` by the moments over all blocks, then scale and shift it."""
    if weight is None and bias is not None:
        done = normalize(normalization, x, ())
        trailing = (1,) * (x.dim() - 2) if normalization.per_channel else ()
        return Normalized(done.y + bias.view(*bias.shape, *trailing), done.totals)
    given = [one for one in (weight, bias) if one is not None]
    return normalize(normalization, x, given)


# --- Layer norm: over the last dims -------------------------------------------------------------

LAYERS = {F.layer_norm: 1e-5, torch.layer_norm: 1e-5, F.rms_norm: None, torch.rms_norm: None}


@register(*LAYERS, any_cuts=True)
def layer_norm(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split of a normalized dim also splits the parameters."""
    dims = call.tensors[0].dims
    leading = dims - len(call.get(1, "normalized_shape"))
    found = [alike(call, d, broadcast) for d in range(leading)]
    for d in range(leading, dims):
        found.append(alike(call, d, split(d - leading), _block_of(d - leading), _bind_layer))
    return found


def _block_of(dim: int) -> Localize:
    def localize(call: Call, part: AxisPart) -> Call:
        shape = list(call.get(1, "normalized_shape"))
        start, stop = part.cells(shape[dim])
        shape[dim] = stop - start
        return call.replaced(1, "normalized_shape", shape)

    return localize


def _bind_layer(call: Call, where: Where) -> Compute:
    x, cells = call.tensors[0], where.call.get(1, "normalized_shape")
    default = LAYERS[call.function]
    is_layer = default is not None
    eps = call.get(4 if is_layer else 3, "eps", default)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    leading = x.dims - len(cells)
    dims = tuple(range(leading, x.dims))
    sums = (*x.shape[:leading], *(1,) * len(dims), 2 if is_layer else 1)
    total = bind_sum(where, dims, sums)
    by = Normalization(
        dims, prod(cells), eps, is_layer, False, total=total, parameters=no_movements(call, 2)
    )

    def compute(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        weight, bias = parameters_at(call, tensors, 2)
        return normalize_block(by, tensors[0], weight, bias).y

    return compute


# --- Group norm: over the channels of a group and all features ----------------------------------


@register(F.group_norm, torch.group_norm, any_cuts=True)
def group_norm(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples, channels, also within groups, or features."""
    found = [alike(call, 0, broadcast)]
    for d in range(1, call.tensors[0].dims):
        found.append(_of_groups(d, len(call.tensors) - 1))
    return found


def _group_norm_of_shapes(input: torch.Tensor, num_groups: int, *_: object, **__: object) -> Any:
    channels = input.shape[1]
    if channels % num_groups:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {list(input.shape)} and num_groups={num_groups}"
        )
    return torch.empty_like(input)


def _layer_norm_of_shapes(
    function: Any, input: torch.Tensor, normalized_shape: Sequence[int], *rest: Any, **named: Any
) -> Any:
    if tuple(input.shape[-len(normalized_shape) :]) != tuple(normalized_shape):
        return function(input, normalized_shape, *rest, **named)
    return torch.empty_like(input)


for _function in (F.layer_norm, torch.layer_norm):
    on_meta[_function] = partial(_layer_norm_of_shapes, _function)
on_meta[F.group_norm] = on_meta[torch.group_norm] = _group_norm_of_shapes


def _of_groups(d: int, others: int, sizes: tuple[int, ...] | None = None) -> SbpSignature:
    # torch's function does not support blocks with parts of groups.
    parameters = split(0, sizes) if d == 1 else broadcast
    one = split(d, sizes)
    inputs = (one, *(parameters,) * others)
    recut = partial(_of_groups, d, others)
    return SbpSignature(inputs, (one,), recut=recut, bind=_bind_groups)


def _bind_groups(call: Call, where: Where) -> Compute:
    x, shape, number = call.tensors[0], where.call.shapes[0], where.call.get(1, "num_groups")
    size = shape[1] // number
    start, stop = where.inputs[0].start[1], where.inputs[0].stop[1]
    features = tuple(range(2, x.dims))
    blocks = Layout(tuple(where.P.ranks), where.P.shape, where.sbps[0], shape).boxes.values()
    cuts_groups = any(box.start[1] % size or box.stop[1] % size for box in blocks)
    first, count = (0, number) if cuts_groups else (start // size, (stop - start) // size)
    total = bind_sum(where, (1, *features) if cuts_groups else features, (x.shape[0], count, 2))
    eps = call.get(4, "eps", 1e-5)
    by = Normalization(
        features,
        size * prod(shape[2:]),
        eps,
        groups=torch.arange(start, stop, device=where.P.device) // size - first,
        group_count=count,
        total=total,
        parameters=no_movements(call, 2),
    )

    differ = total is None and some_are_empty(where)

    def compute(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensors = together_if(differ, tensors)
        x = tensors[0]
        weight, bias = parameters_at(call, tensors, 2)
        if total is None and x.numel():
            return torch.group_norm(x, count, weight, bias, eps, torch.backends.cudnn.enabled)
        return normalize_block(by, x, weight, bias).y

    return compute


# --- Local response norm: over neighbouring channels --------------------------------------------


@register(F.local_response_norm, any_cuts=True)
def local_response_norm(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims except the channels."""
    return [alike(call, d, broadcast) for d in range(call.tensors[0].dims) if d != 1]
