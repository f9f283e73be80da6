"""Arithmetic of optimizers: functions of several tensors, mostly in place on the first."""

from __future__ import annotations

from torch import Tensor

from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.sbp.registry import Call, SbpSignature, forms
from gpudist.sbp.signatures.elementwise import enter, linear_in, point_wise, splits


def add_product(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims of ``x + value * a * b``; linear in ``x`` and one factor together."""
    return [*splits(call), linear_in(call, (0, 1)), linear_in(call, (0, 2))]


def add_quotient(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims of ``x + value * a / b``; linear in ``x`` and the dividend together."""
    return [*splits(call), linear_in(call, (0, 1))]


def between(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims of ``x + weight * (y - x)``; linear in both ends together."""
    return [*splits(call), linear_in(call, (0, 1))]


def copy(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in both tensors together."""
    return [*splits(call), linear_in(call, (0, 1))]


def fill(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; terms cannot be filled with a number."""
    return [*splits(call), SbpSignature((broadcast,) * len(call.tensors), (broadcast,))]


def zero(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims, or set every term to zero."""
    return [*splits(call), SbpSignature((partial_sum,), (partial_sum,))]


enter(add_product, forms("addcmul", "addcmul_"))
enter(add_quotient, forms("addcdiv", "addcdiv_"))
enter(between, forms("lerp", "lerp_"))
enter(copy, [Tensor.copy_])
enter(fill, [Tensor.fill_])
enter(zero, [Tensor.zero_])
enter(
    point_wise,
    forms(
        "abs_", "exp_", "log_", "sqrt_", "rsqrt_", "square_", "reciprocal_", "sin_", "cos_",
        "tanh_", "sigmoid_", "floor_", "ceil_", "round_", "trunc_", "sign_", "pow_", "clamp_",
        "clamp_min_", "clamp_max_", "relu_", "nan_to_num_",
    ),
)  # fmt: skip
