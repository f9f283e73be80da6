"""Comparisons, logic, and ``where``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpudist.sbp.registry import Call, SbpSignature, compose, forms
from gpudist.sbp.signatures.elementwise import enter, linear_in, point_wise, splits


def where(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; linear in both alternatives together, if neither is a number."""
    if len(call.args) + len(call.kwargs) == 1:
        raise NotImplementedError("where of a condition alone: the number of its cells is unknown")
    found = list(splits(call))
    if len(call.tensors) == 3:
        found.append(linear_in(call, (1, 2)))
    return found


@compose(Tensor.where)
def where_method(x: Tensor, condition: Tensor, other: Any) -> Tensor:
    """Compute ``torch.where``, which takes the condition first."""
    return torch.where(condition, x, other)


enter(where, [torch.where])
enter(point_wise, [Tensor.__eq__, Tensor.__ne__])
enter(
    point_wise,
    forms(
        "eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater",
        "greater_equal", "isnan", "isinf", "isfinite", "isclose", "logical_and", "logical_or",
        "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not",
        "__and__", "__or__", "__xor__", "__invert__", "masked_fill", "masked_fill_", "nan_to_num",
        "clip", "heaviside", "copysign", "floor_divide", "__floordiv__", "__mod__", "__pow__",
        "logical_not_", "threshold",
    ),
)  # fmt: skip
