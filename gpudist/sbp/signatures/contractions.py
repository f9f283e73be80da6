"""Contractions: sums of products over named dims, each stated as an equation of ``einsum``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.errors import ShapeError
from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp.call import Call, on_meta
from gpudist.sbp.registry import SbpSignature, compose, forms, register
from gpudist.sbp.signatures.elementwise import align_attribute

Names = tuple[str, ...]
# Products of two tensors, and those that are added to a third one, which comes first.
PRODUCTS = {"outer ger": "i,j->ij", "vdot": "k,k->"}
ADDED_PRODUCTS = {
    "addmm baddbmm": "...ik,...kj->...ij",
    "addbmm": "bik,bkj->ij",
    "addr": "i,j->ij",
}


def names_of(equation: str, dims: tuple[int, ...]) -> tuple[tuple[Names, ...], Names]:
    """Return a name for each dim of each operand and of the result; dims of ``...`` are numbers.

    Args:
        equation: equation of ``torch.einsum``, with or without ``->``.
        dims: number of dims of each operand.
    """
    operands_text, arrow, result = equation.replace(" ", "").partition("->")
    letters = operands_text.replace("...", ".").split(",")
    if len(letters) != len(dims):
        raise ShapeError(
            f"einsum({equation!r}): the equation has {len(letters)} operands, but {len(dims)} "
            "tensors are given; pass one tensor for each operand"
        )
    more = [
        d - len(letters_of.replace(".", "")) for letters_of, d in zip(letters, dims, strict=True)
    ]
    dotted = max(
        (n for letters_of, n in zip(letters, more, strict=True) if "." in letters_of), default=0
    )
    if not arrow:
        all_letters = "".join(letters)
        once = sorted({c for c in all_letters if c != "." and all_letters.count(c) == 1})
        result = ("." if dotted else "") + "".join(once)

    def names_in(letters_of: str, count: int) -> Names:
        # Number the dims of the ellipsis from the last one, since shapes are aligned there.
        dots = [str(i) for i in range(count, 0, -1)]
        return tuple(name for c in letters_of for name in (dots if c == "." else [c]))

    operands = tuple(names_in(letters_of, n) for letters_of, n in zip(letters, more, strict=True))
    return operands, names_in(result.replace("...", "."), dotted)


def linear_in_each(count: int) -> list[SbpSignature]:
    """Return signatures of a product of ``count`` tensors: terms in one factor give terms."""
    return [
        SbpSignature(
            tuple(partial_sum if i == k else broadcast for i in range(count)), (partial_sum,)
        )
        for k in range(count)
    ]


def contraction(equation: str, shapes: Sequence[tuple[int, ...]]) -> list[SbpSignature]:
    """Split a named dim in all tensors that have it; if the result lacks it, it is in terms."""
    operands, result = names_of(equation, tuple(map(len, shapes)))
    signatures: list[SbpSignature] = []
    for name in dict.fromkeys(chain(result, *operands)):
        if any(names.count(name) > 1 for names in operands):
            continue
        has = [names.index(name) if name in names else None for names in operands]
        extent = max(shape[d] for shape, d in zip(shapes, has, strict=True) if d is not None)
        inputs: list[Sbp] = [
            broadcast if d is None or shape[d] != extent else split(d)
            for shape, d in zip(shapes, has, strict=True)
        ]
        output = split(result.index(name)) if name in result else partial_sum
        signatures.append(SbpSignature(tuple(inputs), (output,)))
    return [*signatures, *linear_in_each(len(operands))]


def product(equation: str, call: Call, parts: int, added: int | None = None) -> list[SbpSignature]:
    """Split like ``equation``; the tensor in slot ``added`` has the attribute of the product."""
    if added is None:
        return contraction(equation, call.shapes)
    shape = call.shapes[added]
    factors = [*call.shapes[:added], *call.shapes[added + 1 :]]
    names, ends = names_of(equation, tuple(map(len, factors)))
    extents: dict[str, int] = {}
    for name, n in chain.from_iterable(map(zip, names, factors)):
        if n != 1 or name not in extents:
            extents[name] = n
    # On shapes, torch's function takes a tensor that is larger than the product.
    result = tuple(torch.empty(shape, device="meta").expand([extents[n] for n in ends]).shape)

    def with_added(signature: SbpSignature) -> SbpSignature:
        (output,) = signature.outputs
        attribute = align_attribute(shape, output.dim, result) if output.is_split else partial_sum
        return replace(
            signature, inputs=(*signature.inputs[:added], attribute, *signature.inputs[added:])
        )

    return [with_added(signature) for signature in contraction(equation, factors)]


for names, equation in PRODUCTS.items():
    register(*forms(*names.split()), any_cuts=True)(partial(product, equation))
for names, equation in ADDED_PRODUCTS.items():
    rule = partial(product, equation, added=0)
    register(*forms(*names.split()), any_float=True, any_cuts=True)(rule)
    changing = [getattr(Tensor, f"{name}_") for name in names.split()]
    register(*changing, in_place=True, any_float=True, any_cuts=True)(rule)


@compose(*forms("addmv"))
def addmv(
    input: Tensor, mat: Tensor, vec: Tensor, *, beta: complex = 1, alpha: complex = 1
) -> Tensor:
    # torch.addmv does not broadcast its input to the product with a block without columns.
    columns = input.unsqueeze(-1), mat, vec.unsqueeze(-1)
    return torch.addmm(*columns, beta=beta, alpha=alpha).squeeze(-1)


@compose(Tensor.addmv_)
def addmv_in_place(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input.copy_(addmv(input, *args, **kwargs))


@register(torch.einsum, any_cuts=True)
def einsum(call: Call, parts: int) -> list[SbpSignature]:
    return contraction(call.args[0], call.shapes)


@register(
    *forms("matmul", "mm", "bmm", "mv", "dot", "__matmul__"), torch.linalg.matmul, any_cuts=True
)
def matmul(call: Call, parts: int) -> list[SbpSignature]:
    """Split rows, columns or batch dims; a split of the summed dim gives terms."""
    left, right = (spec.dims > 1 for spec in call.tensors)
    row, column = "i" * left, "j" * right
    equation = f"{'...' * left}{row}k,{'...' * right}k{column}->...{row}{column}"
    return contraction(equation, call.shapes)


def _linear_of_shapes(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    fits = weight.dim() == 2 and input.shape[-1:] == weight.shape[1:]
    if not fits or input.dtype != weight.dtype:
        return F.linear(input, weight, bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


on_meta[F.linear] = _linear_of_shapes


@register(F.linear, any_cuts=True)
def linear(call: Call, parts: int) -> list[SbpSignature]:
    """Split like ``x @ weight.T``; if the result is in terms, the bias must be too."""
    out = "j" * (call.tensors[1].dims - 1)
    bias = 2 if len(call.tensors) == 3 else None
    return product(f"...k,{out}k->...{out}", call, parts, bias)


@compose(Tensor.__rmatmul__)
def matmul_from_the_right(right: Tensor, left: Tensor) -> Tensor:
    return torch.matmul(left, right)


@compose(*forms("inner"))
def inner(input: Tensor, other: Tensor) -> Tensor:
    if not input.dim() or not other.dim():
        return input * other
    return tensordot(input, other, ([-1], [-1]))


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
    # Ranges refuse numbers that are out of range.
    summed = [(range(a.dim())[i], range(b.dim())[j]) for i, j in zip(*dims, strict=True)]
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
    if any(x.dim() != 2 for x in tensors[1:-1]) or not {1, 2} >= {x.dim() for x in tensors}:
        raise RuntimeError("multi_dot: the first and last tensor have 1 or 2 dims, the others 2")
    return reduce(torch.matmul, tensors)


@compose(F.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    is_fit = bias is None or bias.shape == weight.shape[:1]
    if not is_fit or input1.dim() != input2.dim():
        raise RuntimeError(
            "bilinear: the inputs must have as many dims as each other, and a bias the shape "
            f"{list(weight.shape[:1])}"
        )
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias
