"""Products summed over dims by name, ``einsum``, and sums with products, ``addmm``."""

from __future__ import annotations

import torch
from torch import Tensor

from gpudist.errors import ShapeError
from gpudist.sbp.attributes import Sbp, broadcast, partial_sum, split
from gpudist.sbp.registry import Call, Signature, compose, forms, register
from gpudist.sbp.signatures.elementwise import aligned, in_order, linear_in

Names = tuple[str, ...]


def names_of(equation: str, dims: tuple[int, ...]) -> tuple[tuple[Names, ...], Names]:
    """A name for each dim of each operand, and of the result; those of ``...`` are numbers.

    Args:
        equation: as ``torch.einsum`` has it, with or without ``->``.
        dims: of the operands.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    letters = given.replace("...", ".").split(",")
    if len(letters) != len(dims):
        raise ShapeError(f"einsum({equation!r}) is of {len(letters)} tensors, not of {len(dims)}")
    more = [d - len(one.replace(".", "")) for one, d in zip(letters, dims, strict=True)]
    dotted = max((n for one, n in zip(letters, more, strict=True) if "." in one), default=0)
    if not arrow:
        all_letters = "".join(letters)
        once = sorted({c for c in all_letters if c != "." and all_letters.count(c) == 1})
        result = ("." if dotted else "") + "".join(once)

    def named(one: str, count: int) -> Names:
        # Numbers go by the distance from the last of the dots: there shapes are aligned.
        dots = [str(i) for i in range(count, 0, -1)]
        return tuple(name for c in one for name in (dots if c == "." else [c]))

    operands = tuple(named(one, n) for one, n in zip(letters, more, strict=True))
    return operands, named(result.replace("...", "."), dotted)


@register(torch.einsum, any_cuts=True)
def einsum(call: Call, parts: int) -> list[Signature]:
    """A name is split in all tensors that have it; if the result does not, it is terms."""
    operands, result = names_of(call.args[0], tuple(spec.dims for spec in call.tensors))
    found: list[Signature] = []
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
        found.append(Signature(tuple(inputs), (output,)))
    return [*found, *(linear_in(call, (i,)) for i in range(len(operands)))]


@register(*forms("addmm_", "baddbmm_"), in_place=True, any_float=True, any_cuts=True)
@register(*forms("addmm", "baddbmm"), any_float=True, any_cuts=True)
def add_product(call: Call, parts: int) -> list[Signature]:
    """As the product has it; what is added goes along, as terms with terms."""
    batched = call.function.__name__.startswith("baddbmm")
    in_order(call, "input", *(("batch1", "batch2") if batched else ("mat1", "mat2")))
    added, left, _ = call.shapes
    result = call.outputs[0].shape
    row, column = len(left) - 2, len(left) - 1
    products: list[tuple[Sbp, Sbp, int]] = [
        *((split(d), split(d), d) for d in range(row)),
        (split(row), broadcast, row),
        (broadcast, split(column), column),
    ]
    found = [
        Signature((aligned(added, d, result), one, other), (split(d),))
        for one, other, d in products
    ]
    summed = Signature((partial_sum, split(column), split(row)), (partial_sum,))
    return [*found, summed, linear_in(call, (0, 1)), linear_in(call, (0, 2))]


@compose(*forms("outer", "ger"))
def outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(1) * y
