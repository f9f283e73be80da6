"""Functions composed of others that mostly move cells: differences, grids, stacks, diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.layout import partial_sum, split
from gpudist.sbp.call import Call
from gpudist.sbp.registry import AxisPart, SbpSignature, compose, forms, register
from gpudist.sbp.signatures.slicing import splits_of_full_dims


@compose(*forms("diff"))
def diff(
    x: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """Subtract from each cell the preceding one, ``n`` times."""
    around = [part for part in (prepend, x, append) if part is not None]
    joined = torch.cat(around, dim) if len(around) > 1 else x
    if n == 0:
        return x.clone()
    x = joined
    for _ in range(min(n, x.shape[dim])):
        length = x.shape[dim] - 1
        behind, before = x.narrow(dim, 1, length), x.narrow(dim, 0, length)
        x = behind.ne(before) if x.dtype == torch.bool else behind - before
    return x


@compose(*forms("narrow_copy"))
def narrow_copy(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    return x.narrow(dim, start, length).clone()


@compose(*forms("take_along_dim"))
def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return x.flatten().gather(0, indices.flatten())
    if x.dim() != indices.dim():
        raise RuntimeError("take_along_dim: the tensor and the indices must have as many dims")
    along = dim % x.dim()
    shapes = [[1 if d == along else n for d, n in enumerate(y.shape)] for y in (x, indices)]
    common = list(torch.broadcast_shapes(*shapes))
    ends = [
        torch.broadcast_to(y, (*common[:along], y.shape[along], *common[along + 1 :]))
        for y in (x, indices)
    ]
    return ends[0].gather(along, ends[1])


@register(*forms("tril", "triu"), any_cuts=True)
def triangle(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; in a block of rows the diagonal moves right, in a block of columns left."""
    dims = call.tensors[0].dims
    signatures = [SbpSignature((split(d),), (split(d),)) for d in range(dims - 2)]
    for dim, sign in ((dims - 2, 1), (dims - 1, -1)):
        localize = partial(_shift_diagonal, dim, sign)
        signatures.append(SbpSignature((split(dim),), (split(dim),), localize))
    return [*signatures, SbpSignature((partial_sum,), (partial_sum,))]


def _shift_diagonal(dim: int, sign: int, call: Call, part: AxisPart) -> Call:
    start, _ = part.cells(call.shapes[0][dim])
    return call.with_argument(1, "diagonal", call.get(1, "diagonal", 0) + sign * start)


@register(*forms("diagonal"), any_cuts=True)
def diagonal(call: Call, parts: int) -> list[SbpSignature]:
    """Split the other dims, which come before the diagonal in the result."""
    dims = call.tensors[0].dims
    gone = [call.get(2, "dim1", 0) % dims, call.get(3, "dim2", 1) % dims]
    others = [d for d in range(dims) if d not in gone]
    return splits_of_full_dims(others, range(len(others)))


compose(torch.linalg.diagonal)(partial(torch.diagonal, dim1=-2, dim2=-1))


@compose(*forms("trace"))
def trace(x: Tensor) -> Tensor:
    return x.diagonal().sum()


# The second function takes a list of tensors.
@compose(torch.meshgrid, torch._C._VariableFunctions.meshgrid)  # pyright: ignore
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    xs: Sequence[Tensor] = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    if any(x.dim() > 1 or x.dtype != xs[0].dtype for x in xs):
        raise RuntimeError("meshgrid: the tensors must have at most one dim, and one dtype")
    swapped = indexing == "xy" and len(xs) > 1
    order = [1, 0, *range(2, len(xs))] if swapped else list(range(len(xs)))
    shape = [xs[i].numel() for i in order]
    grids: list[Tensor] = []
    for i, x in enumerate(xs):
        extents = [n if k == i else 1 for k, n in zip(order, shape, strict=True)]
        grids.append(torch.broadcast_to(x.reshape(extents), tuple(shape)))
    return tuple(grids)


@compose(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    xs: Sequence[Tensor] = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    return tuple(torch.broadcast_to(x, tuple(shape)) for x in xs)


def _at_least(dims: int, x: Tensor) -> Tensor:
    shape = tuple(x.shape)
    if len(shape) >= dims:
        return x
    if dims == 3 and shape:
        return x.reshape((1, *shape, 1)[-3:] if len(shape) == 1 else (*shape, 1))
    return x.reshape((1,) * (dims - len(shape)) + shape)


for _dims in (1, 2, 3):

    @compose(getattr(torch, f"atleast_{_dims}d"))
    def at_least(*tensors: Any, dims: int = _dims) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            return _at_least(dims, tensors[0])
        xs = tensors[0] if len(tensors) == 1 else tensors
        return tuple(_at_least(dims, x) for x in xs)


def _stack_along(dims: int, along: int, tensors: Sequence[Tensor]) -> Tensor:
    xs = [_at_least(dims, x) for x in tensors]
    return torch.cat(xs, 0 if xs[0].dim() == 1 else along)


compose(torch.vstack, torch.row_stack)(partial(_stack_along, 2, 0))
compose(torch.hstack)(partial(_stack_along, 1, 1))
compose(torch.dstack)(partial(_stack_along, 3, 2))


@compose(torch.column_stack)
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x if x.dim() > 1 else x.reshape(-1, 1) for x in tensors], 1)


def _enter_cut(name: str, along: int) -> None:
    @compose(*forms(name))
    def cut(x: Tensor, places: Any) -> Any:
        return torch.tensor_split(x, places, along if x.dim() > 1 else 0)


for _name, _along in (("vsplit", 0), ("hsplit", 1), ("dsplit", 2)):
    _enter_cut(_name, _along)


@compose(*forms("rot90"))
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    first, second = dims
    if k % 4 == 0:
        return x.clone()
    if k % 4 == 2:
        return x.flip(first, second)
    return x.transpose(first, second).flip(first if k % 4 == 1 else second)


@register(*forms("max_unpool1d", "max_unpool2d", "max_unpool3d"), any_cuts=True)
def unpool(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples and channels, if no block is empty."""
    leading = call.tensors[0].dims - int(call.function.__name__[-2])
    return [
        SbpSignature((split(d), split(d)), (split(d),), cuts="all", takes_empty=False)
        for d in range(leading)
        if call.shapes[0][d] >= parts
    ]
