"""Elementwise arithmetic, with shape broadcasting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp.registry import (
    Call,
    Derive,
    Function,
    SbpSignature,
    Slot,
    forms,
    mapped,
    name_of,
    on_meta,
    register,
    tensors_in,
)

# All elementwise functions that do not work in place.
ELEMENTWISE: set[Function] = set()


def aligned(shape: tuple[int, ...], dim: int, result: tuple[int, ...]) -> Sbp:
    """Return the attribute of an input for which the broadcast result is ``split(dim)``."""
    own = dim - (len(result) - len(shape))
    return broadcast if own < 0 or shape[own] != result[dim] else split(own)


def splits(call: Call) -> Iterator[SbpSignature]:
    """Yield the signatures that split a dim of the result, and the same dim of the inputs."""
    (result,) = {spec.shape for spec in call.outputs}
    for dim in range(len(result)):
        inputs = tuple(aligned(shape, dim, result) for shape in call.shapes)
        yield SbpSignature(inputs, (split(dim),) * len(call.outputs))


def linear_in(call: Call, slots: Sequence[int]) -> SbpSignature:
    """Return the signature with terms in ``slots`` and in the results."""
    inputs = tuple(partial_sum if i in slots else broadcast for i in range(len(call.tensors)))
    return SbpSignature(inputs, (partial_sum,) * len(call.outputs))


def add(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in both tensors together, if neither is a number."""
    found = list(splits(call))
    if len(call.tensors) == 2:
        found.append(linear_in(call, (0, 1)))
    return found


def multiply(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in one factor at a time."""
    return [*splits(call), *(linear_in(call, (i,)) for i in range(len(call.tensors)))]


def divide(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in the dividend, unless the quotient is rounded."""
    found = list(splits(call))
    dividend = call.get(0, "input")
    if isinstance(dividend, Slot) and call.get(2, "rounding_mode") is None:
        found.append(linear_in(call, (dividend.number,)))
    return found


def linear(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in the only input."""
    return [*splits(call), linear_in(call, (0,))]


def point_wise(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; not linear."""
    return list(splits(call))


POINT_WISE = forms(
    "abs", "absolute", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt",
    "square", "reciprocal", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan",
    "sigmoid", "erf", "erfc", "floor", "ceil", "round", "trunc", "sign", "pow", "__rpow__",
    "__rdiv__", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu",
    "softplus", "softsign", "hardtanh", "hardsigmoid", "hardswish", "logsigmoid", "tanhshrink",
    "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmod", "remainder", "atan2",
)  # fmt: skip


def _of_single_cells(function: Function, in_place: bool, *args: Any, **kwargs: Any) -> Any:
    """Apply an elementwise function to meta tensors of one cell, which determine the dtypes."""
    given = list(tensors_in([args, kwargs]))
    # torch.broadcast_shapes is not used, because it imports sympy.
    shape = torch.broadcast_tensors(*given)[0].shape
    if in_place and shape != given[0].shape:
        return function(*args, **kwargs)

    def cell(x: Any) -> Any:
        return torch.ones([1] * x.dim(), dtype=x.dtype) if isinstance(x, torch.Tensor) else x

    try:
        found = function(*mapped(args, cell), **mapped(kwargs, cell))
    except ZeroDivisionError:
        return function(*args, **kwargs)
    if found is NotImplemented:
        # Raised inside torch's comparison, this lets Python ask the other operand.
        raise TypeError(f"{name_of(function)}: an operand is neither a tensor nor a number")
    return mapped(found, lambda y: torch.empty(shape, dtype=y.dtype, device="meta"))


def enter(rule: Derive, functions: Sequence[Function]) -> None:
    """Register ``rule``; functions whose name ends in one underscore work in place."""
    for function in functions:
        name = function.__name__
        in_place = name.endswith("_") and not name.endswith("__")
        on_meta[function] = partial(_of_single_cells, function, in_place)
        if not in_place:
            ELEMENTWISE.add(function)
        register(function, in_place=in_place, any_float=True, any_cuts=True)(rule)


enter(add, forms("add", "sub", "subtract", "rsub", "__rsub__", "add_", "sub_", "subtract_"))
enter(multiply, forms("mul", "multiply", "mul_", "multiply_"))
enter(divide, forms("div", "divide", "true_divide", "div_", "divide_", "true_divide_"))
enter(linear, forms("neg", "negative", "positive", "clone", "neg_", "negative_"))
enter(point_wise, POINT_WISE)
