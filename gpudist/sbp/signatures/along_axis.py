"""Functions of whole lines or matrices: sorts, quantiles, decompositions, transforms.

These rules split all dims except those along which the function works, which would be expensive to
split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gpudist.exchange.autograd import concatenate
from gpudist.geometry.layout import NdSbp, broadcast, split
from gpudist.nn.autocast import widen
from gpudist.sbp.call import Call, Compute, Function
from gpudist.sbp.registry import SbpSignature, Where, compose, forms, register
from gpudist.sbp.signatures.across import axes_that_split, place, stack_blocks, terms
from gpudist.sbp.signatures.elementwise import linear_in
from gpudist.sbp.signatures.reduce import dims_of, log_of_sum_exp, splits_of_kept_dims

Dims = Callable[[Call], Collection[int] | None]


def on_cells(call: Call, where: Where) -> Compute:
    """Apply the function to blocks with cells only, because torch rejects empty ones."""
    shapes, results = [box.shape for box in where.outputs], where.call.outputs

    def compute(tensors: Sequence[torch.Tensor]) -> Any:
        if all([x.numel() for x in tensors]) or any(prod(shape) for shape in shapes):
            return call(tensors)
        pairs = zip(shapes, results, strict=True)
        return [without_cells(shape, spec.dtype, tensors) for shape, spec in pairs]

    return compute


def without_cells(
    shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return an empty result that is connected to the graph of its inputs."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return tensors[0].new_empty(shape, dtype=dtype)
    y = tensors[0].new_ones(0, dtype=dtype)
    for x in tensors:
        y = y * x.reshape(-1)[:0].to(dtype) if x.requires_grad else y
    return y.view(tuple(shape))


def of_others(call: Call, dims: Collection[int]) -> list[SbpSignature]:
    """Return splits of all dims except ``dims``, which the results may keep or drop."""
    count = call.tensors[0].dims

    def outputs(d: int) -> NdSbp:
        dropped = split(d - sum(e < d for e in dims))
        return tuple(split(d) if spec.dims == count else dropped for spec in call.outputs)

    kept = [d for d in range(count) if d not in dims]
    return [SbpSignature((split(d),), outputs(d), bind=on_cells) for d in kept]


def _along(position: int, default: int | None) -> Dims:
    """Return a function that reads the dim argument at a position; ``None`` means all cells."""

    def dims(call: Call) -> Collection[int] | None:
        dim = call.get(position, "dim", default)
        if dim is None or isinstance(dim, bool):
            return None if dim is None else (call.tensors[0].dims - 1,)
        return ((dim % max(call.tensors[0].dims, 1)),)

    return dims


def enter_along(functions: Sequence[Function], dims: Dims, is_linear: bool = False) -> None:
    """Register functions of one tensor that work along some of its dims.

    Among dims that cost the same, one with cells for every worker is split first.
    """

    @register(*functions, any_cuts=True)
    def along(call: Call, parts: int) -> list[SbpSignature]:
        signatures = dims(call)
        if signatures is None or len(call.tensors) > 1:
            return []
        shape = call.shapes[0]
        others = sorted(
            of_others(call, signatures),
            key=lambda signature: shape[signature.inputs[0].dim] < parts,
        )
        return [*others, linear_in(call, (0,))] if is_linear else others


enter_along(forms("sort", "argsort"), _along(1, -1))
enter_along(forms("topk", "kthvalue"), _along(2, -1))
enter_along(forms("mode"), _along(1, -1))
enter_along(forms("median", "nanmedian", "cummax", "cummin"), _along(1, None))


@register(*forms("quantile", "nanquantile"), any_cuts=True)
def quantile(call: Call, parts: int) -> list[SbpSignature]:
    """Split dims that are not reduced; a tensor of quantiles adds a first dim to the result."""
    dims = _along(2, None)(call)
    if dims is None:
        return []
    quantiles = 1 if len(call.tensors) > 1 and call.tensors[1].dims else 0
    # Not by the results: torch rejects blocks without cells.
    keeps = bool(call.get(3, "keepdim", False))
    signatures: list[SbpSignature] = []
    for signature in splits_of_kept_dims(call, tuple(dims), keeps):
        inputs = (*signature.inputs, *(broadcast,) * (len(call.tensors) - 1))
        moved = split(signature.outputs[0].dim + quantiles)
        signatures.append(SbpSignature(inputs, (moved,), bind=on_cells, cuts="all"))
    return signatures


@compose(torch.msort, Tensor.msort)
def msort(input: Tensor) -> Tensor:
    return torch.sort(input, dim=0)[0]


@compose(torch.aminmax, Tensor.aminmax)
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims: Any = () if dim is None else dim
    ends = (torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim))
    return torch.return_types.aminmax(ends)  # pyright: ignore


@register(*forms("cumsum", "cumprod", "logcumsumexp"), any_cuts=True)
def accumulation(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; along the accumulated dim, each block adds the totals of preceding blocks."""
    dims = dims_of(call)
    signatures = [SbpSignature((split(d),), (split(d),), run=_accumulate) for d in dims]
    is_linear = call.function.__name__ == "cumsum"
    return [
        *splits_of_kept_dims(call, dims, True),
        *signatures,
        *(terms(call, 0) if is_linear else []),
    ]


# Reduction of a block, and combination with that of the preceding blocks.
_TOTALS: dict[str, tuple[Function, Function]] = {
    "cumsum": (torch.sum, torch.add),
    "cumprod": (torch.prod, torch.mul),
}


def _accumulate(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    (dim,), dtype = dims_of(where.call), where.call.outputs[0].dtype
    axes = axes_that_split(where, 0, (dim,))
    if call.function.__name__ == "logcumsumexp" and not dtype.is_complex:
        before = log_of_sum_exp(widen(tensors[0]), (dim,), where, place(where, axes))
        # The preceding blocks are one cell more in front.
        cells = concatenate([before.to(dtype), tensors[0].to(dtype)], dim)
        return torch.logcumsumexp(cells, dim).narrow(dim, 1, cells.shape[dim] - 1)
    local = call(tensors)
    reduce, combine = _TOTALS.get(call.function.__name__, (torch.logsumexp, torch.logaddexp))
    totals = reduce(tensors[0].to(local.dtype), dim, keepdim=True)
    before = stack_blocks(totals, where, axes)[: place(where, axes)]
    return combine(local, reduce(before, 0))


# --- Matrices: the last two dims ----------------------------------------------------------------

_MATRICES = (
    "cholesky", "cholesky_ex", "cond", "det", "eig", "eigh", "eigvals", "eigvalsh", "inv",
    "inv_ex", "lu", "lu_factor", "lu_factor_ex", "matrix_exp", "matrix_power", "matrix_rank",
    "pinv", "qr", "slogdet", "svd", "svdvals",
)  # fmt: skip
_OF_TORCH = (
    "cholesky", "det", "inverse", "logdet", "matrix_exp", "matrix_power", "pinverse", "qr",
    "slogdet", "svd",
)  # fmt: skip


@register(*[getattr(torch.linalg, n) for n in _MATRICES], *forms(*_OF_TORCH), any_cuts=True)
def of_matrices(call: Call, parts: int) -> list[SbpSignature]:
    """Split the batch dims only."""
    if len(call.shapes) > 1:
        return []
    return [
        SbpSignature((split(d),), (split(d),) * len(call.outputs), bind=on_cells)
        for d in range(call.tensors[0].dims - 2)
    ]


@register(torch.linalg.solve, torch.linalg.solve_triangular, any_cuts=True)
def solve(call: Call, parts: int) -> list[SbpSignature]:
    """Split the batch dims, if both sides have the same number of dims."""
    left, right = call.shapes
    result = call.outputs[0].shape
    if len(left) != len(right) or left[:-2] != right[:-2]:
        return []
    batch = [
        SbpSignature((split(d), split(d)), (split(d),), bind=on_cells)
        for d in range(len(result) - 2)
    ]
    if not call.get(2, "left", True):
        return batch
    last = len(result) - 1
    return [*batch, SbpSignature((broadcast, split(last)), (split(last),), bind=on_cells)]
