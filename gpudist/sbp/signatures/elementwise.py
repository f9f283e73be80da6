"""Elementwise functions, with shape broadcasting: one table of names.

The functions that change their first tensor, such as ``add_`` and ``__iadd__``, follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp.call import Call, Function, Slot, new_as_in, on_meta
from gpudist.sbp.registry import Derive, SbpSignature, compose, forms, name_of, register
from gpudist.sbp.trees import map_tree, tensors_in

# All elementwise functions that do not work in place.
ELEMENTWISE: set[Function] = set()


def align_attribute(shape: tuple[int, ...], dim: int, result: tuple[int, ...]) -> Sbp:
    """Return the attribute of an input for which the broadcast result is ``split(dim)``."""
    dim_of_input = dim - (len(result) - len(shape))
    return (
        broadcast if dim_of_input < 0 or shape[dim_of_input] != result[dim] else split(dim_of_input)
    )


def splits(call: Call) -> Iterator[SbpSignature]:
    """Yield the signatures that split a dim of the result, and the same dim of the inputs."""
    (result,) = {spec.shape for spec in call.outputs}
    for dim in range(len(result)):
        inputs = tuple(align_attribute(shape, dim, result) for shape in call.shapes)
        yield SbpSignature(inputs, (split(dim),) * len(call.outputs))


def linear_in(call: Call, slots: Sequence[int]) -> SbpSignature:
    """Return the signature with terms in ``slots`` and in the results."""
    inputs = tuple(partial_sum if i in slots else broadcast for i in range(len(call.tensors)))
    return SbpSignature(inputs, (partial_sum,) * len(call.outputs))


def linear_together(*together: tuple[int, ...]) -> Derive:
    """Return the rule that splits all dims and is linear in each of these groups of tensors.

    Args:
        together: slots of each group; a group counts if none of its tensors is a number instead.
    """

    def derive(call: Call, parts: int) -> list[SbpSignature]:
        groups = (slots for slots in together if max(slots) < len(call.tensors))
        return [*splits(call), *(linear_in(call, slots) for slots in groups)]

    return derive


point_wise = linear_together()
linear = linear_together((0,))
add = linear_together((0, 1))
multiply = linear_together((0,), (1,))
add_product = linear_together((0, 1), (0, 2))


def divide(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in the dividend, unless the quotient is rounded."""
    dividend = call.get(0, "input")
    is_linear = isinstance(dividend, Slot) and call.get(2, "rounding_mode") is None
    return [*splits(call), *([linear_in(call, (dividend.number,))] if is_linear else [])]


def where(call: Call, parts: int) -> Sequence[SbpSignature]:
    """Split all dims; linear in both alternatives together, if neither is a number."""
    if len(call.args) + len(call.kwargs) == 1:
        raise NotImplementedError("where of a condition alone: the number of its cells is unknown")
    return linear_together((1, 2))(call, parts)


RULES: dict[Derive, str] = {
    add: "add sub subtract rsub addcdiv lerp __add__ __radd__ __sub__ __rsub__",
    multiply: "mul multiply __mul__ __rmul__",
    divide: "div divide true_divide __truediv__ __div__",
    add_product: "addcmul",
    linear: "neg negative clone deg2rad rad2deg",
    point_wise: """
        abs absolute acos acosh airy_ai angle arccos arccosh arcsin arcsinh arctan arctan2
        arctanh asin asinh atan atan2 atanh bessel_j0 bessel_j1 bessel_y0 bessel_y1
        bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
        bitwise_xor ceil celu chebyshev_polynomial_t chebyshev_polynomial_u
        chebyshev_polynomial_v chebyshev_polynomial_w clamp clamp_max clamp_min clip
        copysign cos cosh digamma elu entr eq erf erfc erfcx erfinv exp exp2 expit expm1 fill
        fix float_power floor floor_divide fmax fmin fmod frac frexp gammainc gammaincc gammaln
        gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
        heaviside hermite_polynomial_h hermite_polynomial_he hypot i0 i0e i1 i1e igamma
        igammac isclose isfinite isinf isnan isneginf isposinf isreal laguerre_polynomial_l
        lcm ldexp le leaky_relu legendre_polynomial_p less less_equal lgamma log log10 log1p
        log2 log_ndtr logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
        logit logsigmoid lt masked_fill maximum minimum mish modified_bessel_i0
        modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln mvlgamma
        nan_to_num ndtr ndtri ne nextafter not_equal polygamma pow psi reciprocal relu relu6
        remainder round rsqrt scaled_modified_bessel_k0 scaled_modified_bessel_k1 selu sgn
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
        shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w sigmoid sign signbit
        silu sin sinc sinh softplus softshrink softsign spherical_bessel_j0 sqrt square tan
        tanh tanhshrink threshold trunc xlog1py xlogy zeta __and__ __eq__ __floordiv__
        __ge__ __gt__ __invert__ __le__ __lshift__ __lt__ __mod__ __ne__ __or__ __pow__
        __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __ror__ __rpow__ __rrshift__
        __rshift__ __rxor__ __xor__
    """,
}


def _of_single_cells(function: Function, in_place: bool, *args: Any, **kwargs: Any) -> Any:
    """Apply an elementwise function to meta tensors of one cell, which determine the dtypes."""
    tensors = tensors_in([args, kwargs])
    # torch.broadcast_shapes is not used, because it imports sympy.
    shape = torch.broadcast_tensors(*tensors)[0].shape
    if in_place and shape != tensors[0].shape:
        return function(*args, **kwargs)

    def cell(x: Any) -> Any:
        return torch.ones([1] * x.dim(), dtype=x.dtype) if isinstance(x, torch.Tensor) else x

    try:
        results = function(*map_tree(args, cell), **map_tree(kwargs, cell))
    except ZeroDivisionError:
        return function(*args, **kwargs)
    if results is NotImplemented:
        # Raised inside torch's comparison, this lets Python ask the other operand.
        raise TypeError(f"{name_of(function)}: an operand is neither a tensor nor a number")
    like = new_as_in(max(tensors, key=Tensor.dim), shape)
    return map_tree(results, lambda y: torch.empty_like(like, dtype=y.dtype))


def enter(rule: Derive, functions: Sequence[Function], in_place: bool = False) -> None:
    """Register ``rule`` for elementwise functions, with the dtypes of single cells."""
    on_meta.update(
        {function: partial(_of_single_cells, function, in_place) for function in functions}
    )
    register(*functions, in_place=in_place, any_float=True, any_cuts=True)(rule)
    if not in_place:
        ELEMENTWISE.update(functions)


for rule, names in RULES.items():
    enter(rule, forms(*names.split()))
    enter(rule, forms(*names.split(), in_place=True), in_place=True)
enter(point_wise, [torch.polar])
enter(where, [torch.where])
enter(add, [Tensor.copy_], in_place=True)
enter(linear, forms("zero", "conj_physical", in_place=True), in_place=True)
register(torch.complex, any_cuts=True)(add)
# Views, of complex tensors and of others; they are linear over the real numbers.
register(
    *forms("conj", "conj_physical", "positive", "resolve_conj", "resolve_neg"),
    *(torch.real, torch.imag, Tensor.real.__get__, Tensor.imag.__get__),  # pyright: ignore
    any_cuts=True,
)(linear)


@register(torch.view_as_real, torch.view_as_complex, any_cuts=True)
def pairs(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims, except the one that has the two parts of a number."""
    dims = min(call.tensors[0].dims, call.outputs[0].dims)
    return [SbpSignature((split(d),), (split(d),)) for d in range(dims)]


@compose(Tensor.where)
def where_method(x: Tensor, condition: Tensor, other: Any) -> Tensor:
    """Compute ``torch.where``, which takes the condition first."""
    return torch.where(condition, x, other)
