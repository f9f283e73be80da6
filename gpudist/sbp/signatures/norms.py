"""Layer, RMS, batch and group norm: moments over what is split are two sums of small numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.sbp.attributes import Sbp, broadcast, split
from gpudist.sbp.registry import (
    Call,
    Localize,
    Part,
    Run,
    Signature,
    Slot,
    Where,
    compose,
    register,
)
from gpudist.sbp.signatures.across import axes_that_split, total

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def normalized(
    x: torch.Tensor,
    dims: tuple[int, ...],
    cells: int,
    eps: float,
    where: Where,
    axes: Sequence[int],
    subtracts_mean: bool = True,
) -> torch.Tensor:
    """``x`` with mean 0 and variance 1 over ``dims``, of which all blocks have ``cells`` cells."""
    x = x.to(_WIDE.get(x.dtype, x.dtype))
    if subtracts_mean:
        x = x - total(x.sum(dims, keepdim=True), where, axes) / cells
    squares = total(x.square().sum(dims, keepdim=True), where, axes)
    return x * (squares / cells + eps).rsqrt()


def _tensor(call: Call, tensors: Sequence[torch.Tensor], position: int, name: str) -> Any:
    """That argument, ``None`` if it is not given."""
    given = call.get(position, name)
    return tensors[given.number] if isinstance(given, Slot) else None


def _scaled(y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def _same_dims(
    call: Call, d: int, others: Sbp, localize: Localize | None = None, run: Run | None = None
) -> Signature:
    """Input and result split in ``d``, and all other tensors as ``others``."""
    inputs = (split(d), *(others,) * (len(call.tensors) - 1))
    return Signature(inputs, (split(d),), localize, run)


@register(F.layer_norm, F.rms_norm, any_cuts=True)
def layer_norm(call: Call, parts: int) -> list[Signature]:
    """Splits of all dims, of those that are normalized with the parameters."""
    dims = call.tensors[0].dims
    leading = dims - len(call.get(1, "normalized_shape"))
    found = [_same_dims(call, d, broadcast) for d in range(leading)]
    for d in range(leading, dims):
        found.append(_same_dims(call, d, split(d - leading), _block_of(d - leading), _layer_norm))
    return found


def _block_of(dim: int) -> Localize:
    def localize(call: Call, part: Part) -> Call:
        shape = list(call.get(1, "normalized_shape"))
        start, stop = part.cells(shape[dim])
        shape[dim] = stop - start
        return call.replaced(1, "normalized_shape", shape)

    return localize


def _layer_norm(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    x, is_layer_norm = tensors[0], call.function is F.layer_norm
    shape = where.call.get(1, "normalized_shape")
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    eps = call.get(4 if is_layer_norm else 3, "eps", 1e-5 if is_layer_norm else None)
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    axes = axes_that_split(where, 0, dims)
    y = normalized(x, dims, prod(shape), eps, where, axes, subtracts_mean=is_layer_norm)
    weight = _tensor(call, tensors, 2, "weight")
    bias = _tensor(call, tensors, 3, "bias") if is_layer_norm else None
    return _scaled(y, weight, bias).to(x.dtype)


@compose(F.batch_norm)
def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """The running moments stay as they lie: what is seen is boxed for them."""
    if not training:
        running = running_mean, running_var
        return torch.batch_norm(input, weight, bias, *running, False, 0.0, eps, False)
    F._verify_batch_size(input.size())  # pyright: ignore
    if running_mean is not None or running_var is not None:
        dims = [d for d in range(input.dim()) if d != 1]
        with torch.no_grad():
            variance, mean = torch.var_mean(input.detach(), dims)
            for running, seen in ((running_mean, mean), (running_var, variance)):
                if running is not None:
                    running.mul_(1 - momentum).add_(seen, alpha=momentum)
    return torch.batch_norm(input, weight, bias, None, None, True, 0.0, eps, False)


@register(torch.batch_norm, any_cuts=True)
def batch_norm_of_moments(call: Call, parts: int) -> list[Signature]:
    """Splits of channels, with all that is known of each, and of all other dims."""
    is_training = call.args[5]
    if is_training and any(isinstance(one, Slot) for one in call.args[3:5]):
        raise NotImplementedError(
            "torch.batch_norm: of global tensors running moments are kept by "
            "torch.nn.functional.batch_norm"
        )
    run = _batch_norm if is_training else None
    return [
        _same_dims(call, d, split(0) if d == 1 else broadcast, run=run)
        for d in range(call.tensors[0].dims)
    ]


def _batch_norm(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    x = tensors[0]
    dims = tuple(d for d in range(x.dim()) if d != 1)
    axes = axes_that_split(where, 0, dims)
    if not axes and x.numel():
        return call(tensors)
    cells = prod(where.call.tensors[0].shape[d] for d in dims)
    y = normalized(x, dims, cells, call.args[7], where, axes)
    return _by_channel(y, call, tensors, 1).to(x.dtype)


def _by_channel(
    y: torch.Tensor, call: Call, tensors: Sequence[torch.Tensor], position: int
) -> torch.Tensor:
    """Scaled by the weight, the argument at ``position``, and moved by the bias behind it."""
    given = [
        _tensor(call, tensors, position + i, name) for i, name in enumerate(("weight", "bias"))
    ]
    trailing = (1,) * (y.dim() - 2)
    weight, bias = [None if one is None else one.view(-1, *trailing) for one in given]
    return _scaled(y, weight, bias)


@register(F.group_norm, any_cuts=True)
def group_norm(call: Call, parts: int) -> list[Signature]:
    """Splits of samples, of whole groups, and of features."""
    found = [_same_dims(call, 0, broadcast)]
    if call.get(1, "num_groups") % parts == 0:
        groups = _same_dims(call, 1, split(0), _some_groups)
        found.append(replace(groups, recut=lambda sizes: None))
    features = range(2, call.tensors[0].dims)
    return [*found, *(_same_dims(call, d, broadcast, run=_group_norm) for d in features)]


def _some_groups(call: Call, part: Part) -> Call:
    return call.replaced(1, "num_groups", call.get(1, "num_groups") // part.parts)


def _group_norm(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    x, groups = tensors[0], call.get(1, "num_groups")
    lines = x.reshape(x.shape[0], groups, x.shape[1] // groups * prod(x.shape[2:]))
    whole = where.call.tensors[0].shape
    cells = prod(whole[1:]) // where.call.get(1, "num_groups")
    axes = axes_that_split(where, 0, range(2, x.dim()))
    y = normalized(lines, (2,), cells, call.get(4, "eps", 1e-5), where, axes)
    return _by_channel(y.reshape(x.shape), call, tensors, 2).to(x.dtype)
