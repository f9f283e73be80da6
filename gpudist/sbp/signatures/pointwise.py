"""Further elementwise functions of torch: special functions, bits, complex numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.layout import broadcast, split
from gpudist.sbp.registry import (
    AxisPart,
    Call,
    Derive,
    Function,
    SbpSignature,
    compose,
    forms,
    register,
)
from gpudist.sbp.signatures.elementwise import (
    add,
    divide,
    enter,
    linear,
    multiply,
    point_wise,
    splits,
)

FUNCTIONS = (
    "acosh", "angle", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh",
    "asinh", "atanh", "bitwise_left_shift", "bitwise_right_shift", "digamma", "erfinv", "exp2",
    "fix", "float_power", "fmax", "fmin", "frac", "frexp", "gcd", "hypot", "i0", "igamma",
    "igammac", "isneginf", "isposinf", "isreal", "lcm", "ldexp", "lgamma", "logaddexp",
    "logaddexp2", "logit", "mvlgamma", "nextafter", "polygamma", "sgn", "signbit", "sinc", "xlogy",
)  # fmt: skip
SPECIAL = (
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "chebyshev_polynomial_t",
    "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w", "digamma",
    "entr", "erf", "erfc", "erfcx", "erfinv", "exp2", "expit", "expm1", "gammainc", "gammaincc",
    "gammaln", "hermite_polynomial_h", "hermite_polynomial_he", "i0", "i0e", "i1", "i1e",
    "laguerre_polynomial_l", "legendre_polynomial_p", "log1p", "log_ndtr", "logit",
    "modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1",
    "multigammaln", "ndtr", "ndtri", "polygamma", "psi", "round", "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1", "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w", "sinc", "spherical_bessel_j0", "xlog1py", "xlogy", "zeta",
)  # fmt: skip
IN_PLACE = (
    "absolute_", "acos_", "acosh_", "arccos_", "arccosh_", "arcsin_", "arcsinh_", "arctan2_",
    "arctan_", "arctanh_", "asin_", "asinh_", "atan2_", "atan_", "atanh_", "bitwise_and_",
    "bitwise_left_shift_", "bitwise_not_", "bitwise_or_", "bitwise_right_shift_", "bitwise_xor_",
    "celu_", "clip_", "conj_physical_", "copysign_", "cosh_", "deg2rad_", "digamma_", "elu_",
    "eq_", "erf_", "erfc_", "erfinv_", "exp2_", "expm1_", "fix_", "float_power_", "floor_divide_",
    "fmod_", "frac_", "gcd_", "ge_", "greater_", "greater_equal_", "gt_", "hardtanh_",
    "heaviside_", "hypot_", "i0_", "igamma_", "igammac_", "lcm_", "ldexp_", "le_", "leaky_relu_",
    "less_", "less_equal_", "lgamma_", "log10_", "log1p_", "log2_", "logical_and_",
    "logical_or_", "logical_xor_", "logit_", "lt_", "mvlgamma_", "ne_", "nextafter_",
    "not_equal_", "polygamma_", "rad2deg_", "remainder_", "selu_", "sgn_", "sinc_", "sinh_",
    "tan_", "threshold_", "xlogy_",
)  # fmt: skip
_BITS = ("and", "or", "xor", "lshift", "rshift")
OPERATORS: dict[Derive, tuple[str, ...]] = {
    add: ("__add__", "__radd__", "__sub__"),
    multiply: ("__mul__", "__rmul__"),
    divide: ("__truediv__", "__div__"),
    point_wise: (
        *("__lt__", "__le__", "__gt__", "__ge__", "__rfloordiv__", "__rmod__", "__lshift__"),
        *("__rshift__", *(f"__r{name}__" for name in _BITS)),
    ),
}
CHANGES: dict[Derive, tuple[str, ...]] = {
    add: ("__iadd__", "__isub__"),
    multiply: ("__imul__",),
    divide: ("__itruediv__", "__idiv__"),
    point_wise: (
        *("__ifloordiv__", "__imod__", "__ipow__"),
        *(f"__i{name}__" for name in _BITS),
    ),
}


def methods_of(names: tuple[str, ...]) -> list[Function]:
    """Return the methods of tensors with these names, as far as they exist."""
    return [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]


enter(point_wise, forms(*FUNCTIONS, *IN_PLACE))
enter(point_wise, [getattr(torch.special, name) for name in SPECIAL])
enter(linear, forms("deg2rad", "rad2deg", "conj_physical", "resolve_neg"))
for rule, names in OPERATORS.items():
    enter(rule, methods_of(names))
for rule, names in CHANGES.items():
    register(*methods_of(names), in_place=True, any_float=True, any_cuts=True)(rule)


def enter_parts_of_numbers() -> None:
    """Register views of complex tensors that are linear over the real numbers."""
    functions = [*forms("conj", "resolve_conj"), torch.real, torch.imag]
    parts = [Tensor.real.__get__, Tensor.imag.__get__]  # pyright: ignore
    register(*functions, *parts, view=True, any_cuts=True)(linear)


enter_parts_of_numbers()
enter(point_wise, [torch.polar])


@register(torch.complex, any_cuts=True)
def complex_of(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in both parts together."""
    return add(call, parts)


@register(torch.view_as_real, view=True, any_cuts=True)
def view_as_real(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; the result has a new last dim of two cells."""
    return [SbpSignature((split(d),), (split(d),)) for d in range(call.tensors[0].dims)]


@register(torch.view_as_complex, view=True, any_cuts=True)
def view_as_complex(call: Call, parts: int) -> list[SbpSignature]:
    return [SbpSignature((split(d),), (split(d),)) for d in range(call.tensors[0].dims - 1)]


@register(torch.isin, torch.bucketize, any_cuts=True)
def among(call: Call, parts: int) -> list[SbpSignature]:
    """Split the first tensor; the others are copies."""
    shape = call.outputs[0].shape
    others = (broadcast,) * (len(call.tensors) - 1)
    if call.shapes[0] != shape:
        return []
    return [SbpSignature((split(d), *others), (split(d),)) for d in range(len(shape))]


@register(*forms("tril", "triu"), any_cuts=True)
def triangle(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a block of rows or columns has its own offset of the diagonal."""
    dims = call.tensors[0].dims
    found = [SbpSignature((split(d),), (split(d),)) for d in range(dims - 2)]
    for d, sign in ((dims - 2, 1), (dims - 1, -1)):
        found.append(SbpSignature((split(d),), (split(d),), _shifted_diagonal(d, sign)))
    return found


def _shifted_diagonal(d: int, sign: int) -> Any:
    def localize(call: Call, part: AxisPart) -> Call:
        start, _ = part.cells(call.shapes[0][d])
        return call.replaced(1, "diagonal", call.get(1, "diagonal", 0) + sign * start)

    return localize


@register(torch.cross, Tensor.cross, torch.linalg.cross, any_cuts=True)
def cross(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims except the one with the three coordinates."""
    shape = call.outputs[0].shape
    dim = call.get(2, "dim")
    if dim is None:
        dim = -1 if call.function is torch.linalg.cross else shape.index(3)
    dim = dim % len(shape)
    # Name the dim explicitly: a block may have three cells along an earlier dim.
    localize = partial(_with_dim, dim)
    found = (replace(one, localize=localize) for one in splits(call))
    return [one for one in found if one.outputs[0] != split(dim)]


def _with_dim(dim: int, call: Call, part: AxisPart) -> Call:
    return call.replaced(2, "dim", dim)


@compose(torch.equal, Tensor.equal)
def equal(input: Tensor, other: Tensor) -> bool:
    return input.shape == other.shape and bool((input == other).all())


@compose(torch.allclose, Tensor.allclose)
def allclose(
    input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@compose(Tensor.__contains__)
def contains(x: Tensor, element: Any) -> bool:
    return bool((x == element).any())


@compose(torch.is_nonzero, Tensor.is_nonzero)
def is_nonzero(input: Tensor) -> bool:
    return bool(input)


@compose(torch.is_same_size, Tensor.is_same_size)
def is_same_size(input: Tensor, other: Tensor) -> bool:
    return input.shape == other.shape


@compose(torch.dist, Tensor.dist)
def dist(input: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(input - other, p)


@compose(torch.pairwise_distance)
def pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@compose(torch.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    x1, x2 = (x if x.shape == shape else x.expand(shape) for x in (x1, x2))
    sizes = [torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps) for x in (x1, x2)]
    return (x1 / sizes[0] * (x2 / sizes[1])).sum(dim)


@register(torch.cdist, any_cuts=True)
def cdist(call: Call, parts: int) -> list[SbpSignature]:
    """Split the rows of either tensor, or batch dims."""
    left, right = call.shapes
    result = call.outputs[0].shape
    dims = len(result)
    found: list[SbpSignature] = []
    for d in range(dims - 2):
        ones = [
            broadcast if (own := d - dims + len(s)) < 0 or s[own] != result[d] else split(own)
            for s in (left, right)
        ]
        found.append(SbpSignature(tuple(ones), (split(d),)))
    found.append(SbpSignature((split(len(left) - 2), broadcast), (split(dims - 2),)))
    found.append(SbpSignature((broadcast, split(len(right) - 2)), (split(dims - 1),)))
    return found
