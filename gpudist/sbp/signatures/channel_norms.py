"""Batch norm and instance norm, including their running moments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import NdSbp, broadcast, partial_sum, split
from gpudist.nn.norm import kernels
from gpudist.nn.norm.node import BlockNorm, given, is_alone, normalize
from gpudist.nn.norm.normalization import Normalization, Running
from gpudist.nn.norm.strides import gradient_as_laid_out
from gpudist.sbp.call import Call, Compute, on_meta
from gpudist.sbp.registry import SbpSignature, Where, compose, name_of, register
from gpudist.sbp.scope import current_scope
from gpudist.sbp.signatures.norms import (
    bind_normalization,
    require_shape,
    result_like,
    slots_of,
)

Moments = tuple[torch.Tensor | None, torch.Tensor | None]


def batch_norm_and_moments(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the batch norm of a plain tensor, and mean and unbiased variance of each channel."""
    mean, variance = (input.new_zeros(input.shape[1], dtype=dtype) for _ in range(2))
    y = updating_batch_norm(input, weight, bias, mean, variance, 1.0, eps)
    return y, mean, variance


def updating_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Compute the batch norm of a plain tensor, and update its running moments."""
    on = torch.backends.cudnn.enabled
    return gradient_as_laid_out(
        torch.batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps, on)
    )


def instance_norm_and_moments(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the instance norm of a plain tensor, and mean and unbiased variance.

    The moments have one value for each channel of each sample.
    """
    variance, mean = torch.var_mean(input.detach().to(dtype), list(range(2, input.dim())))
    y = torch.instance_norm(
        input, weight, bias, None, None, True, 0.0, eps, torch.backends.cudnn.enabled
    )
    return gradient_as_laid_out(y), mean, variance


def plain_batch_norm(*args: Any) -> torch.Tensor:
    """Compute ``torch.batch_norm`` without changing the running moments."""
    return _normalize_any(torch.batch_norm, *args)


def plain_instance_norm(*args: Any) -> torch.Tensor:
    """Compute ``torch.instance_norm`` without running moments."""
    return _normalize_any(torch.instance_norm, *args)


def _normalize_any(
    norm: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    if not x.numel():
        # torch's functions refuse it.
        parameters = [parameter.sum() for parameter in (weight, bias) if parameter is not None]
        return x + sum(parameters) if parameters else x.clone()
    return gradient_as_laid_out(norm(x, weight, bias, *options, torch.backends.cudnn.enabled))


INSTANCES = (instance_norm_and_moments, plain_instance_norm)


def _of_shapes(leading: int, input: torch.Tensor, *rest: Any) -> Any:
    y = result_like(input, (*rest[:2], *(x for x in rest[2:] if isinstance(x, torch.Tensor))))
    if not leading:
        return y
    dtype = rest[-1]
    return (y, *(input.new_empty(input.shape[2 - leading : 2], dtype=dtype) for _ in range(2)))


on_meta[plain_batch_norm] = on_meta[plain_instance_norm] = partial(_of_shapes, 0)
on_meta[updating_batch_norm] = partial(_of_shapes, 0)
on_meta[batch_norm_and_moments] = partial(_of_shapes, 1)
on_meta[instance_norm_and_moments] = partial(_of_shapes, 2)


def call_rule(function: Any, *args: Any) -> Any:
    """Execute ``function`` by its rule; at least one argument must be a global tensor."""
    for first in args:
        if hasattr(first, "_local"):
            return type(first).__torch_function__(function, (), args)
    raise TypeError(f"{name_of(function)}: no argument is a global tensor")


@register(
    plain_batch_norm, plain_instance_norm, batch_norm_and_moments, instance_norm_and_moments,
    updating_batch_norm, any_cuts=True,
)  # fmt: skip
def by_channel(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split of the channels also splits parameters and moments."""
    is_instance = call.function in INSTANCES
    is_plain = call.function in (plain_batch_norm, plain_instance_norm)
    # torch's functions reject some blocks without cells.
    bind = None if is_plain and not call.args[5] else _bind
    signatures: list[SbpSignature] = []
    for d in range(call.tensors[0].dims):
        others = split(0) if d == 1 else broadcast
        inputs = (split(d), *(others,) * (len(call.tensors) - 1))
        has_statistic = d == 1 or (d == 0 and is_instance)
        seen: NdSbp = ()
        if len(call.args) == 5:
            moment = split(d if is_instance else 0) if has_statistic else broadcast
            seen = (moment, moment)
        signatures.append(SbpSignature(inputs, (split(d), *seen), bind=bind))
    copies = (broadcast,) * len(call.tensors), (broadcast,) * len(signatures[0].outputs)
    signatures.append(SbpSignature(*copies, bind=bind))
    return signatures


def _bind(call: Call, where: Where) -> Compute:
    x, is_instance = call.tensors[0], call.function in INSTANCES
    dims = tuple(d for d in range(x.dims) if d > 1 or (d == 0 and not is_instance))
    returns_moments = len(call.args) == 5
    updates = call.function is updating_batch_norm
    eps, dtype = call.args[3:5] if returns_moments else (call.args[6 + (not updates)], None)
    by = bind_normalization(Normalization(dims, eps), where)
    if kernels.never_fit(by, x.shape, x.dtype, where.P.device):
        return call.as_function
    if not returns_moments:
        moments = {"running_mean": 3, "running_var": 4} if updates else {}
        slots, momentum = slots_of(call, weight=1, bias=2, **moments), call.args[5 + (not updates)]
        return BlockNorm(by, slots, None, momentum, call.as_function)
    slots = slots_of(call, weight=1, bias=2)
    moment_shape = x.shape[:2] if is_instance else x.shape[1:2]

    def compute(tensors: Sequence[torch.Tensor]) -> Any:
        x = tensors[0]
        parameters = given(*[None if i is None else tensors[i] for i in slots])
        if is_alone(by, x, parameters):
            return call.as_function(tensors)
        moments = list(x.new_zeros((2, *moment_shape), dtype=dtype).unbind())
        if not is_instance and kernels.bound_norm(by, x, parameters) is not None:
            running = Running(moments[0], moments[1], 1.0)
            return normalize(by, x, parameters, running).y, *moments
        y, totals, shift = normalize(by, x, parameters)
        if by.total is not None:
            mean, variance = by.moments(totals, shift)
            assert mean is not None
            unbiased = variance * (by.cells / max(by.cells - 1, 1))
            moments = [moment.reshape(moment_shape).to(dtype) for moment in (mean, unbiased)]
        return y, *moments

    return compute


def remember(running: Moments, seen: Sequence[Any], momentum: float) -> None:
    """Update running moments, global or replicated, with the moments of this batch."""
    for old, new in zip(running, seen, strict=True):
        if old is None:
            continue
        if not hasattr(old, "_local"):
            if (all_workers := _workers_beyond(new)) is not None:
                new = new.to_global(all_workers, (broadcast,) * all_workers.axes)
            new = (
                new.full_tensor()
                if any(attribute != broadcast for attribute in new.sbp)
                else new._local
            )
            if new.shape != old.shape:
                # This rank holds no part of the tensor.
                continue
        old.detach().lerp_(new.to(old.dtype), momentum)


def _workers_beyond(x: Any) -> Any:
    scope = current_scope()
    is_part = scope is not None and x.placement.partition.size < scope.placement.partition.size
    return scope.placement if scope is not None and is_part else None


# Momenta of calls that are cached. One that differs at every call is not among them for long.
_MOST_MOMENTA = 8
_momenta: set[float] = set()


def _update_in_place(input: Any, running: Moments, momentum: float) -> bool:
    """Return whether the norm itself may update running moments: each worker holds all of them."""
    if not hasattr(input, "_local"):
        return False
    partition = input._global_spec.placement.partition
    if len(partition.ranks) < partition.wire.size and _workers_beyond(input) is not None:
        return False
    for attribute in input.sbp:
        if attribute.dim == 1 or attribute == partial_sum:
            return False
    for moment in running:
        if type(moment) is not torch.Tensor or moment.dtype not in (torch.float32, torch.float64):
            return False
    if len(_momenta) < _MOST_MOMENTA:
        _momenta.add(momentum)
    return momentum in _momenta


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
    """Compute batch norm; moments of the batch are boxed to the layout of the running ones."""
    running = running_mean, running_var
    if not training:
        return call_rule(plain_batch_norm, input, weight, bias, *running, False, 0.0, eps)
    F._verify_batch_size(input.size())  # pyright: ignore
    known = running_mean if running_mean is not None else running_var
    if known is None:
        return call_rule(plain_batch_norm, input, weight, bias, None, None, True, 0.0, eps)
    if _update_in_place(input, running, momentum):
        return call_rule(updating_batch_norm, input, weight, bias, *running, momentum, eps)
    y, *seen = call_rule(batch_norm_and_moments, input, weight, bias, eps, known.dtype)
    require_shape(input.shape[1:2], *running)
    remember(running, seen, momentum)
    return y


@compose(F.instance_norm)
def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Compute instance norm; running moments are updated by averages over samples."""
    running = running_mean, running_var
    if not use_input_stats:
        # Given moments are the same for all samples.
        return call_rule(plain_batch_norm, input, weight, bias, *running, False, 0.0, eps)
    F._verify_spatial_size(input.size())  # pyright: ignore
    known = running_mean if running_mean is not None else running_var
    if known is None:
        return call_rule(plain_instance_norm, input, weight, bias, None, None, True, 0.0, eps)
    y, *seen = call_rule(instance_norm_and_moments, input, weight, bias, eps, known.dtype)
    require_shape(input.shape[1:2], *running)
    with torch.no_grad():
        remember(running, [moment.mean(0) for moment in seen], momentum)
    return y


def _without_names(function: Any) -> Any:
    """Adapt ``function`` to torch's own order, with parameters before the running moments."""

    def norm(
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool | None = None,
        momentum: float = 0.1,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
        use_input_stats: bool | None = None,
    ) -> torch.Tensor:
        takes = bool(use_input_stats if training is None else training)
        return function(input, running_mean, running_var, weight, bias, takes, momentum, eps)

    return norm


compose(torch.batch_norm)(_without_names(batch_norm))
compose(torch.instance_norm)(_without_names(instance_norm))
