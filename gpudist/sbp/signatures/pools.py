"""Pools: sliding windows, adaptive windows, and means over full dims, which give terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import gpudist.nn as layers
from gpudist.geometry.boxes import Box
from gpudist.geometry.layout import partial_sum, split
from gpudist.sbp.call import Call, Compute, Function, new_as_in, on_meta
from gpudist.sbp.registry import SbpSignature, Where, forms, register
from gpudist.sbp.signatures.block_layers import LayerAlongLast, along_last, bind_along_last

_LAYERS: Any = layers


@dataclass(frozen=True)
class Pool:
    """A call of a pool.

    Attributes:
        kind: name part of its layer's name, ``Distributed<kind>Pool<dims>d``.
        arguments: arguments of the layer, by name.
        dims: number of pooled dims, the last ones of the tensor.
        means: pooled dims that become one cell, their mean.
        results: number of results; two with indices.
    """

    kind: str
    arguments: dict[str, Any]
    dims: int
    means: tuple[int, ...] = ()
    results: int = 1


def entry_per_dim(value: Any, dims: int) -> list[Any]:
    """Return one entry per dim, given a single value or one value per dim."""
    if isinstance(value, (tuple, list)):
        return list(value) * (dims if len(value) == 1 else 1)
    return [value] * dims


def _window_arguments(call: Call, dims: int, kernel_at: int) -> dict[str, Any]:
    kernel = entry_per_dim(call.get(kernel_at, "kernel_size"), dims)
    stride = call.get(kernel_at + 1, "stride")
    return {
        "kernel_size": kernel,
        "stride": kernel if stride in (None, (), []) else entry_per_dim(stride, dims),
    }


def _max_pool(call: Call, dims: int) -> Pool:
    indices = returns_indices(call.function)
    more = {
        "padding": entry_per_dim(call.get(3, "padding", 0), dims),
        "dilation": entry_per_dim(call.get(4, "dilation", 1), dims),
        "ceil_mode": bool(call.get(5, "ceil_mode", False)),
        "return_indices": indices,
    }
    return Pool("Max", _window_arguments(call, dims, 1) | more, dims, results=1 + indices)


def _avg_pool(call: Call, dims: int) -> Pool:
    """Read the arguments of an average pool; a dim as long as the kernel is reduced to its mean."""
    divisor = call.get(6, "divisor_override")
    arguments = _window_arguments(call, dims, 1) | {
        "padding": entry_per_dim(call.get(3, "padding", 0), dims),
        "ceil_mode": bool(call.get(4, "ceil_mode", False)),
        "count_include_pad": bool(call.get(5, "count_include_pad", True)),
        "divisor_override": divisor,
    }
    sides = zip(arguments["kernel_size"], arguments["padding"], call.shapes[0][-dims:], strict=True)
    means = [d for d, (k, p, n) in enumerate(sides) if k == n and not p and divisor is None]
    for d in means:
        arguments["kernel_size"][d] = arguments["stride"][d] = 1
    return Pool("Avg", arguments, dims, tuple(means))


def _lp_pool(call: Call, dims: int) -> Pool:
    more = {
        "norm_type": float(call.get(1, "norm_type")),
        "ceil_mode": bool(call.get(4, "ceil_mode", False)),
    }
    return Pool("LP", _window_arguments(call, dims, 2) | more, dims)


def _sizes(output_size: Any, extents: Sequence[int]) -> list[int]:
    sizes = entry_per_dim(output_size, len(extents))
    return [n if size is None else size for size, n in zip(sizes, extents, strict=True)]


def _adaptive_avg_pool(call: Call, dims: int) -> Pool:
    sizes = _sizes(call.get(1, "output_size"), call.shapes[0][-dims:])
    means = tuple(d for d, size in enumerate(sizes) if size == 1)
    return Pool("AdaptiveAvg", {"output_size": sizes}, dims, means)


def _adaptive_max_pool(call: Call, dims: int) -> Pool:
    indices = returns_indices(call.function)
    sizes = _sizes(call.get(1, "output_size"), call.shapes[0][-dims:])
    arguments = {"output_size": sizes, "return_indices": indices}
    return Pool("AdaptiveMax", arguments, dims, results=1 + indices)


def returns_indices(function: Function) -> bool:
    always: Any = torch.adaptive_max_pool1d
    return function is always or function.__name__.endswith("_with_indices")


_KINDS = {
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "lp_pool": _lp_pool,
    "adaptive_avg_pool": _adaptive_avg_pool,
    "adaptive_max_pool": _adaptive_max_pool,
}


def _pool(read: Any, dims: int, call: Call, parts: int) -> list[SbpSignature]:
    """Split samples, channels and windows; a split of a dim reduced to its mean gives terms."""
    is_linear = read in (_avg_pool, _adaptive_avg_pool)
    if not call.tensors[0].dtype.is_floating_point:
        return []
    pool: Pool = read(call, dims)
    bind = partial(bind_along_last, dims, partial(_bind, read, dims))
    first = call.tensors[0].dims - dims
    signatures = along_last(call, bind, dims, pool.results)
    if (pool.arguments.get("divisor_override") or 1) < 0:
        # gpudist has no layer with a negative divisor.
        return [*signatures[:first], SbpSignature((partial_sum,), (partial_sum,))]
    for d in pool.means:
        term = SbpSignature((split(first + d),), (partial_sum,), bind=bind, cuts="all")
        signatures[first + d] = term
    return [*signatures, SbpSignature((partial_sum,), (partial_sum,))] if is_linear else signatures


def _adaptive_of_shapes(
    function: Function, dims: int, input: torch.Tensor, output_size: Any
) -> Any:
    sizes = _sizes(output_size, input.shape[-dims:])
    if not dims < input.dim() <= dims + 2 or min(sizes) < 0:
        return function(input, output_size)
    return new_as_in(input, (*input.shape[:-dims], *sizes))


for _name, _read in _KINDS.items():
    for _dims in (1, 2, 3):
        _functions = forms(f"{_name}{_dims}d")
        if "max" in _name:
            _functions += forms(f"{_name}{_dims}d_with_indices")
        register(*_functions, any_cuts=True)(partial(_pool, _read, _dims))
        if _name == "adaptive_avg_pool":
            on_meta.update({f: partial(_adaptive_of_shapes, f, _dims) for f in _functions})


def _bind(read: Any, dims: int, where: Where) -> Compute:
    pool: Pool = read(where.call, dims)
    first = len(where.inputs[0].shape) - dims
    where, mean = _without_means(where, tuple(first + d for d in pool.means))
    if mean is not None and len(pool.means) == dims:
        return lambda tensors: mean(tensors[0])
    kind = getattr(_LAYERS, f"Distributed{pool.kind}Pool{dims}d")
    layer = LayerAlongLast(where, dims, lambda P: kind(P, **pool.arguments), pool.kind)
    return layer if mean is None else lambda tensors: layer([mean(tensors[0])])


@dataclass(frozen=True)
class _OwnMean:
    """Function that computes this worker's term of the mean over some dims, which it keeps.

    Attributes:
        dims: reduced dims.
        share: this worker's share of the cells.
    """

    dims: tuple[int, ...]
    share: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.share:
            return x.sum(self.dims, keepdim=True)
        y = x.mean(self.dims, keepdim=True)
        return y if self.share == 1 else y * self.share


def _without_means(where: Where, dims: Sequence[int]) -> tuple[Where, _OwnMean | None]:
    """Return ``where`` for a tensor with one cell along ``dims``, and a function of the mean."""
    if not dims:
        return where, None
    cells, shape = where.inputs[0], list(where.call.shapes[0])
    start, stop, share = list(cells.start), list(cells.stop), 1.0
    for dim in dims:
        share *= cells.shape[dim] / shape[dim]
        start[dim], stop[dim], shape[dim] = 0, 1, 1
    kept = [
        axis
        for axis, attribute in enumerate(where.sbps[0])
        if where.P.shape[axis] > 1 and not (attribute.is_split and attribute.dim in dims)
    ]
    rest = replace(
        where,
        P=where.P.along(kept),
        call=where.call.with_shapes([tuple(shape)]),
        inputs=(Box(tuple(start), tuple(stop)),),
    )
    return rest, _OwnMean(tuple(dims), share)
