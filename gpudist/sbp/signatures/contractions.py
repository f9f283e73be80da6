"""Contractions: ``einsum``, which sums products over named dims, ``addmm`` and others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.errors import ShapeError
from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp.registry import Call, SbpSignature, compose, forms, register
from gpudist.sbp.signatures.elementwise import aligned, linear_in

Names = tuple[str, ...]


def names_of(equation: str, dims: tuple[int, ...]) -> tuple[tuple[Names, ...], Names]:
    """Return a name for each dim of each operand and of the result; dims of ``...`` are numbers.

    Args:
        equation: equation of ``torch.einsum``, with or without ``->``.
        dims: number of dims of each operand.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    letters = given.replace("...", ".").split(",")
    if len(letters) != len(dims):
        raise ShapeError(
            f"einsum({equation!r}): the equation has {len(letters)} operands, but {len(dims)} "
            "tensors are given; pass one tensor for each operand"
        )
    more = [d - len(one.replace(".", "")) for one, d in zip(letters, dims, strict=True)]
    dotted = max((n for one, n in zip(letters, more, strict=True) if "." in one), default=0)
    if not arrow:
        all_letters = "".join(letters)
        once = sorted({c for c in all_letters if c != "." and all_letters.count(c) == 1})
        result = ("." if dotted else "") + "".join(once)

    def named(one: str, count: int) -> Names:
        # Number the dims of the ellipsis from the last one, since shapes are aligned there.
        dots = [str(i) for i in range(count, 0, -1)]
        return tuple(name for c in one for name in (dots if c == "." else [c]))

    operands = tuple(named(one, n) for one, n in zip(letters, more, strict=True))
    return operands, named(result.replace("...", "."), dotted)


@register(torch.einsum, any_cuts=True)
def einsum(call: Call, parts: int) -> list[SbpSignature]:
    """Split a named dim in all tensors that have it; if the result lacks it, it is in terms."""
    operands, result = names_of(call.args[0], tuple(spec.dims for spec in call.tensors))
    found: list[SbpSignature] = []
    for name in dict.fromkeys(name for names in operands for name in names):
        if any(names.count(name) > 1 for names in operands):
            continue
        has = [names.index(name) if name in names else None for names in operands]
        extent = max(shape[d] for shape, d in zip(call.shapes, has, strict=True) if d is not None)
        inputs: list[Sbp] = [
            broadcast if d is None or shape[d] != extent else split(d)
            for shape, d in zip(call.shapes, has, strict=True)
        ]
        output = split(result.index(name)) if name in result else partial_sum
        found.append(SbpSignature(tuple(inputs), (output,)))
    return [*found, *(linear_in(call, (i,)) for i in range(len(operands)))]


@register(*forms("addmm_", "baddbmm_"), in_place=True, any_float=True, any_cuts=True)
@register(*forms("addmm", "baddbmm"), any_float=True, any_cuts=True)
def add_product(call: Call, parts: int) -> list[SbpSignature]:
    """Split like the product; the added tensor has the attribute of the product."""
    added, left, _ = call.shapes
    result = call.outputs[0].shape
    row, column = len(left) - 2, len(left) - 1
    products: list[tuple[Sbp, Sbp, int]] = [
        *((split(d), split(d), d) for d in range(row)),
        (split(row), broadcast, row),
        (broadcast, split(column), column),
    ]
    found = [
        SbpSignature((aligned(added, d, result), one, other), (split(d),))
        for one, other, d in products
    ]
    summed = SbpSignature((partial_sum, split(column), split(row)), (partial_sum,))
    return [*found, summed, linear_in(call, (0, 1)), linear_in(call, (0, 2))]


@compose(*forms("outer", "ger"))
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    return input.unsqueeze(1) * vec2


@compose(*forms("inner"))
def inner(input: Tensor, other: Tensor) -> Tensor:
    if not input.dim() or not other.dim():
        return input * other
    return tensordot(input, other, ([-1], [-1]))


@compose(*forms("vdot"))
def vdot(input: Tensor, other: Tensor) -> Tensor:
    return torch.dot(input.conj() if input.is_complex() else input, other)


@compose(torch.linalg.vecdot)
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    return ((x.conj() if x.is_complex() else x) * y).sum(dim)


@compose(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Tensor:
    """Contract by ``einsum``: the summed dims of ``b`` share names with those of ``a``."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    summed = [(i % a.dim(), j % b.dim()) for i, j in zip(*dims, strict=True)]
    letters = iter(ascii_letters)
    left = [next(letters) for _ in range(a.dim())]
    right = [next(letters) for _ in range(b.dim())]
    for i, j in summed:
        right[j] = left[i]
    of_left = [name for i, name in enumerate(left) if i not in [i for i, _ in summed]]
    of_right = [name for j, name in enumerate(right) if j not in [j for _, j in summed]]
    equation = f"{''.join(left)},{''.join(right)}->{''.join(of_left + of_right)}"
    return torch.einsum(equation, a, b)


@compose(torch.chain_matmul)
def chain_matmul(*matrices: Tensor, out: None = None) -> Tensor:
    return multi_dot(matrices)


@compose(torch.linalg.multi_dot)
def multi_dot(tensors: Sequence[Tensor], *, out: None = None) -> Tensor:
    """Multiply from left to right."""
    return reduce(torch.matmul, tensors)


def added(input: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Return ``beta * input + alpha * product``; with ``beta=0``, ``input`` is ignored."""
    product = product if alpha == 1 else alpha * product
    if beta == 0:
        return product
    return (input if beta == 1 else beta * input) + product


@compose(torch.addbmm, Tensor.addbmm)
def addbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return added(input, torch.einsum("bij,bjk->ik", batch1, batch2), beta, alpha)


@compose(torch.addmv, Tensor.addmv)
def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return added(input, mat @ vec, beta, alpha)


@compose(torch.addr, Tensor.addr)
def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return added(input, outer(vec1, vec2), beta, alpha)


def enter_in_place(method: Any, function: Any) -> None:
    """Register ``x.method_(...)`` as ``function``, with the result copied to ``x``."""

    @compose(method)
    def in_place(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(function(x, *args, **kwargs))


enter_in_place(Tensor.addbmm_, addbmm)
enter_in_place(Tensor.addmv_, addmv)
enter_in_place(Tensor.addr_, addr)


@compose(F.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return found if bias is None else found + bias


@register(F.embedding_bag, any_cuts=True)
def embedding_bag(call: Call, parts: int) -> list[SbpSignature]:
    """Split bags of equal length, or the cells of vectors."""
    if call.get(3, "max_norm") is not None or call.get(7, "sparse", False):
        raise NotImplementedError(
            "embedding_bag of global tensors does not support max_norm and sparse; leave them out"
        )
    others = len(call.tensors) - 2
    found = [SbpSignature((broadcast, split(1), *(broadcast,) * others), (split(1),))]
    if call.tensors[0].dims == 2 and not call.get(5, "scale_grad_by_freq", False):
        bags = SbpSignature((split(0), broadcast, *(split(0),) * others), (split(0),))
        found.insert(0, bags)
    return found
