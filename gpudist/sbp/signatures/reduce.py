"""Reductions: torch reduces each block, then the results of all blocks are combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isinf, prod
from typing import Any

import torch

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.nn.autocast import LOW, widen
from gpudist.sbp.call import Call, Function, on_meta
from gpudist.sbp.registry import Derive, Run, SbpSignature, Where, compose, forms, register
from gpudist.sbp.signatures.across import axes_that_split, largest, stack_blocks, terms, total


def dims_of(call: Call, position: int = 1) -> tuple[int, ...]:
    """Return the reduced dims, counted from the front; all dims if none is given."""
    argument = call.get(position, "dim")
    count = call.tensors[0].dims
    if argument is None or isinstance(argument, bool) or argument in ((), []):
        return tuple(range(count))
    dims = (argument,) if isinstance(argument, int) else tuple(argument)
    return tuple(sorted(d % count for d in dims)) if count else ()


def keeps_dims(call: Call, position: int = 2) -> bool:
    return bool(call.get(position, "keepdim", False))


def splits_of_kept_dims(
    call: Call, dims: tuple[int, ...], keeps: bool, results: int = 1
) -> list[SbpSignature]:
    """Return splits of the dims that are not reduced."""
    kept = [d for d in range(call.tensors[0].dims) if d not in dims]
    places = kept if keeps else range(len(kept))
    return [
        SbpSignature((split(d),), (split(place),) * results)
        for d, place in zip(kept, places, strict=True)
    ]


def together(dims: tuple[int, ...], run: Run, results: int = 1) -> list[SbpSignature]:
    """Return splits of reduced dims for which ``run`` gives every worker the result."""
    return [SbpSignature((split(d),), (broadcast,) * results, run=run) for d in dims]


def reduction(
    run: Run | None, result: Sbp = broadcast, is_linear: bool = False, dim_at: int = 1
) -> Derive:
    """Return the rule of a reduction, which splits all dims.

    Args:
        run: reduces a block where a reduced dim is split, if torch's function is not enough.
        result: attribute of the results where a reduced dim is split.
        is_linear: whether the results of terms are terms.
        dim_at: position of the argument ``dim``, which ``keepdim`` follows.
    """

    def derive(call: Call, parts: int) -> list[SbpSignature]:
        dims = dims_of(call, dim_at)
        kept = splits_of_kept_dims(call, dims, keeps_dims(call, dim_at + 1))
        reduced = [SbpSignature((split(d),), (result,), run=run) for d in dims]
        return [*kept, *reduced, *(terms(call, 0) if is_linear else [])]

    return derive


def sum_over(x: torch.Tensor, dims: tuple[int, ...], like: int) -> torch.Tensor:
    """Sum over ``dims``, and keep them if the result is to have ``like`` dims."""
    return x.sum(dims, keepdim=like == x.dim()) if dims else x


def _mean_of_shapes(function: Function, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not input.is_floating_point() or "dtype" in kwargs:
        return function(input, *args, **kwargs)
    return torch.sum(input, *args, **kwargs)


# On meta tensors, torch.nansum keeps the shape if dim is ().
for _function in forms("mean", "nansum"):
    on_meta[_function] = partial(_mean_of_shapes, _function)


def _mean(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    (x,), dims = tensors, dims_of(where.call)
    dtype = call.kwargs.get("dtype") or x.dtype
    cells = prod(where.call.tensors[0].shape[d] for d in dims)
    # The divisor is global.
    wide = x.to(torch.float32 if dtype in LOW else dtype)
    return (sum_over(wide, dims, len(where.outputs[0].shape)) / cells).to(dtype)


@register(*forms("var", "std", "var_mean", "std_mean"), any_cuts=True)
def moments(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split reduced dim needs two sums: the mean, then squared deviations."""
    dims = dims_of(call)
    if call.tensors[0].dtype.is_complex:
        return []
    results = 2 if call.function.__name__.endswith("_mean") else 1
    keeps = keeps_dims(call, 3)
    # torch would warn about blocks without cells.
    splits = [replace(s, run=_moments) for s in splits_of_kept_dims(call, dims, keeps, results)]
    return [*splits, *together(dims, _moments, results)]


def _moments(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> Any:
    (x,), dims = tensors, dims_of(where.call)
    axes = axes_that_split(where, 0, dims)
    if not axes and x.numel():
        return call(tensors)
    wide = widen(x)
    cells = prod(where.call.tensors[0].shape[d] for d in dims)
    center = total(wide.sum(dims, keepdim=True), where, axes) / cells
    degrees = cells - _correction(where.call)
    squares = total((wide - center).square().sum(dims, keepdim=True), where, axes)
    variance = squares / degrees
    if degrees < 0:
        # Torch divides the value by zero, and the gradient by the negative number.
        variance = variance + (squares / 0 - variance).detach()
    name = call.function.__name__
    results = [_root(variance) if name.startswith("std") else variance]
    if name.endswith("_mean"):
        results.append(center)
    reductions = [sum_over(y, dims, len(where.outputs[0].shape)).to(x.dtype) for y in results]
    return tuple(reductions) if len(reductions) > 1 else reductions[0]


def _root(x: torch.Tensor) -> torch.Tensor:
    is_zero = x == 0
    return x.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)


def _correction(call: Call) -> float:
    if "correction" in call.kwargs:
        correction = call.kwargs["correction"]
        return 1 if correction is None else correction
    dim = call.get(1, "dim")
    return int(dim if isinstance(dim, bool) else call.get(2, "unbiased", True))


def _extreme_of_shapes(function: Any, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
    if x.numel() or (function in forms("max", "min") and (rest or named)):
        return function(x, *rest, **named)
    return torch.sum(x, *rest, **named, dtype=x.dtype)  # torch's extremes refuse empty blocks


for _function in forms("amax", "amin", "max", "min"):
    on_meta[_function] = partial(_extreme_of_shapes, _function)


def _extremes(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    name = call.function.__name__
    is_least, is_equal_nan = name in ("amin", "min"), name in ("max", "min")
    return _extremes_along(tensors[0], dims_of(where.call), is_least, where, is_equal_nan)


def _extremes_along(
    x: torch.Tensor,
    dims: tuple[int, ...],
    is_least: bool,
    where: Where,
    is_equal_nan: bool = False,
) -> torch.Tensor:
    """Return the extremes, whose gradient equal cells share.

    The gradient of an extreme that is NaN is shared by the cells that are NaN if these count as
    equal; otherwise it is NaN for all cells.
    """
    _require_cells(where, dims)
    axes = axes_that_split(where, 0, dims)
    blocks = stack_blocks(_extreme(x.detach(), dims, is_least), where, axes)
    extremes = blocks.amin(0) if is_least else blocks.amax(0)
    chosen = x == extremes
    if x.is_floating_point():
        if is_equal_nan:
            chosen = chosen | (x != x)
        count = total(chosen.sum(dims, keepdim=True), where, axes)
        cells = x.where(chosen, 0) / count
        if not is_equal_nan:
            cells = torch.where(extremes != extremes, x * extremes, cells)
        shared = total(cells.sum(dims, keepdim=True), where, axes)
        # The value is exactly a cell of x; the gradient is the gradient of the mean of such cells.
        extremes = torch.where(extremes.isfinite(), extremes + (shared - shared.detach()), shared)
    return extremes if len(where.outputs[0].shape) == x.dim() else extremes.squeeze(dims)


def _require_cells(where: Where, dims: tuple[int, ...]) -> None:
    whole = where.call.shapes[0]
    if not all(whole[d] for d in dims):
        torch.amax(torch.empty(whole, device="meta"), dims)  # Raises, on every rank alike.


def _extreme(x: torch.Tensor, dims: tuple[int, ...], is_least: bool) -> torch.Tensor:
    if all(x.shape[d] for d in dims):
        return x.amin(dims, keepdim=True) if is_least else x.amax(dims, keepdim=True)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.new_full(shape, _worst(x.dtype, is_least))


def _worst(dtype: torch.dtype, is_least: bool) -> float | int:
    if dtype == torch.bool:
        return is_least
    if dtype.is_floating_point:
        return torch.inf if is_least else -torch.inf
    limits = torch.iinfo(dtype)
    return limits.max if is_least else limits.min


@register(*forms("max", "min"), any_cuts=True)
def extreme_or_larger(call: Call, parts: int) -> list[SbpSignature]:
    """Split ``max`` or ``min`` in its three forms: all cells, one dim with indices, two tensors."""
    if len(call.tensors) == 2:
        return []
    dims = dims_of(call)
    if call.get(1, "dim") is None:
        return together(dims, _extremes)
    return [*splits_of_kept_dims(call, dims, keeps_dims(call), 2), *together(dims, _places, 2)]


@register(*forms("argmax", "argmin"), any_cuts=True)
def places(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; find the first position of the extreme, along a dim or in the tensor."""
    dims = dims_of(call)
    if call.get(1, "dim") is None and call.tensors[0].dims != 1:
        return []
    return [*splits_of_kept_dims(call, dims, keeps_dims(call)), *together(dims, _places)]


def _places(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> Any:
    (x,), (dim,) = tensors, dims_of(where.call)
    _require_cells(where, (dim,))
    axes = axes_that_split(where, 0, (dim,))
    name = call.function.__name__
    is_least = name.endswith("min")
    if x.shape[dim]:
        in_block = x.detach().min(dim, True) if is_least else x.detach().max(dim, True)
        values, indices = in_block.values, in_block.indices + where.inputs[0].start[dim]
    else:
        values = _extreme(x.detach(), (dim,), is_least)
        indices = torch.full(values.shape, where.call.tensors[0].shape[dim], device=x.device)
    blocks = stack_blocks(values, where, axes)
    extremes = blocks.amin(0) if is_least else blocks.amax(0)
    # Of equal cells, the first one counts; an empty block has none.
    far = indices.new_full((), where.call.tensors[0].shape[dim])
    # Nothing equals NaN, which is the extreme of a dim that contains it.
    is_extreme = (blocks == extremes) | (blocks != blocks)
    chosen = stack_blocks(indices, where, axes).where(is_extreme, far).amin(0)
    keeps = len(where.outputs[0].shape) == x.dim()
    index = chosen if keeps else chosen.squeeze(dim)
    if name.startswith("arg"):
        return index
    if x.is_floating_point():
        extremes = _pick_cells(x, dim, chosen, where, axes)
    return extremes if keeps else extremes.squeeze(dim), index


def _pick_cells(
    x: torch.Tensor, dim: int, index: torch.Tensor, where: Where, axes: Sequence[int]
) -> torch.Tensor:
    local = index - where.inputs[0].start[dim]
    is_own = (local >= 0) & (local < x.shape[dim])
    if not x.shape[dim]:
        return total(x.sum(dim, keepdim=True), where, axes)
    cells = x.gather(dim, local.clamp(0, x.shape[dim] - 1))
    return total(cells.where(is_own, 0), where, axes)


def _truths(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    axes = axes_that_split(where, 0, dims_of(where.call))
    local = call(tensors)
    number = local.to(torch.uint8)
    is_any = call.function.__name__ == "any"
    truths = largest(number, where, axes) if is_any else 1 - largest(1 - number, where, axes)
    return truths.to(local.dtype)


def log_of_sum_exp(
    x: torch.Tensor, dims: tuple[int, ...], where: Where, before: int | None = None
) -> torch.Tensor:
    """Return the logarithm of the sum of exponentials over ``dims``, which are kept.

    A block in which all cells are -inf adds nothing, to no derivative either.

    Args:
        x: block.
        dims: reduced dims.
        where: place of the blocks.
        before: number of leading blocks to add, which may be none; by default all.
    """
    most = _extreme(x.detach(), dims, False)
    cells = (x - most.masked_fill(most.isinf(), 0)).masked_fill(
        x.detach() == -torch.inf, -torch.inf
    )
    own = cells.exp().sum(dims, keepdim=True)
    axes = axes_that_split(where, 0, dims)
    maxima, sums = stack_blocks(torch.stack([most, own]), where, axes).unbind(1)
    if before is not None:
        is_after = torch.arange(len(sums), device=x.device) >= before
        is_after = is_after.view(-1, *(1,) * x.dim())
        maxima, sums = maxima.masked_fill(is_after, -torch.inf), sums.masked_fill(is_after, 0)
    shift = maxima.detach().amax(0)
    shift = shift.masked_fill(shift.isinf(), 0)
    scales = (maxima.detach().masked_fill(maxima == torch.inf, 0) - shift).exp()
    sums = (sums * scales).sum(0)
    if before is None:
        return sums.log() + shift
    is_none = sums == 0
    return (sums.masked_fill(is_none, 1).log() + shift).masked_fill(is_none, -torch.inf)


def _log_of_sum_exp(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    x, dims = tensors[0], dims_of(where.call)
    if x.is_complex():
        return _in_two_steps(call, tensors, where)
    dtype = where.call.outputs[0].dtype
    y = log_of_sum_exp(x.to(torch.float32 if dtype in LOW else dtype), dims, where).to(dtype)
    return y if len(where.outputs[0].shape) == x.dim() else y.squeeze(dims)


def _in_two_steps(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    blocks = stack_blocks(call(tensors), where, axes_that_split(where, 0, dims_of(where.call)))
    return call.function(blocks, 0)


def _vector_norm(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    """Return the norm of the norms of the blocks."""
    (x,), order, dims = tensors, call.get(1, "ord", 2), dims_of(where.call, 2)
    axes = axes_that_split(where, 0, dims)
    if order in (0, 1):
        return total(call(tensors), where, axes)
    if isinf(order):
        # Equal cells share the gradient, on all workers.
        sizes = x.abs()
        wide = sizes.to(call.kwargs.get("dtype") or sizes.dtype)
        return _extremes_along(wide, dims, order < 0, where)
    if all(x.shape[d] for d in dims):
        norms = call(tensors)
    else:
        sizes = x.abs()
        wide = sizes.to(call.kwargs.get("dtype") or sizes.dtype)
        norms = sum_over(wide, dims, len(where.outputs[0].shape)) + (torch.inf if order < 0 else 0)
    return torch.linalg.vector_norm(stack_blocks(norms, where, axes), order, 0)


REDUCTIONS = {
    "sum": reduction(None, partial_sum, is_linear=True),
    # Terms may not be summed later, because one may not be a number.
    "nansum count_nonzero": reduction(None, partial_sum),
    "mean": reduction(_mean, partial_sum, is_linear=True),
    "amax amin": reduction(_extremes),
    "any all": reduction(_truths),
    "prod": reduction(_in_two_steps),
    "logsumexp": reduction(_log_of_sum_exp),
}
for _names, _rule in REDUCTIONS.items():
    register(*forms(*_names.split()), any_cuts=True)(_rule)
register(torch.linalg.vector_norm, any_cuts=True)(reduction(_vector_norm, dim_at=2))


@compose(torch.norm, torch.Tensor.norm)
def norm(
    input: torch.Tensor,
    p: float | str | None = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if p not in ("fro", None) and isinstance(p, str):
        raise NotImplementedError(
            f"norm: p={p!r} is not supported for global tensors; pass 'fro' or a number"
        )
    order = 2 if p is None or isinstance(p, str) else p
    return torch.linalg.vector_norm(input, order, dim, keepdim, dtype=dtype)


@compose(*forms("nanmean"))
def nanmean(input: torch.Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    count = (~input.isnan()).sum(() if dim is None else dim, keepdim)
    return torch.nansum(input, () if dim is None else dim, keepdim, **kwargs) / count


@compose(torch.linalg.norm)
def linalg_norm(
    A: torch.Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> torch.Tensor:
    """Compute vector norms, or matrix norms if two dims are given or the input has two."""
    is_pair = isinstance(dim, (tuple, list)) and len(dim) == 2
    if ord is not None and (is_pair or (dim is None and A.dim() == 2)):
        return torch.linalg.matrix_norm(A, ord, dim or (-2, -1), keepdim, **kwargs)
    return torch.linalg.vector_norm(A, 2 if ord is None else ord, dim, keepdim, **kwargs)


@register(torch.linalg.matrix_norm, any_cuts=True)
def matrix_norm(call: Call, parts: int) -> list[SbpSignature]:
    """Split the batch dims; the Frobenius norm splits all dims."""
    dims = dims_of(call.with_argument(2, "dim", call.get(2, "dim", (-2, -1))), 2)
    signatures = splits_of_kept_dims(call, dims, keeps_dims(call, 3))
    return (
        [*signatures, *together(dims, _frobenius)]
        if call.get(1, "ord", "fro") == "fro"
        else signatures
    )


def _frobenius(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    (x,), keeps = tensors, keeps_dims(call, 3)
    dims = dims_of(where.call.with_argument(2, "dim", call.get(2, "dim", (-2, -1))), 2)
    dtype = call.kwargs.get("dtype")
    norms = torch.linalg.vector_norm(x, 2, dims, keeps, dtype=dtype)
    return torch.linalg.vector_norm(
        stack_blocks(norms, where, axes_that_split(where, 0, dims)), 2, 0
    )
