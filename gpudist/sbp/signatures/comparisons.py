"""Comparisons, logic, and choices between two tensors."""

from __future__ import annotations

from torch import Tensor

from gpudist.sbp.registry import Call, Signature, Slot, forms
from gpudist.sbp.signatures.elementwise import enter, linear_in, point_wise, splits


def where(call: Call, parts: int) -> list[Signature]:
    """Linear in both alternatives together; a number has no terms."""
    found = list(splits(call))
    choices = [call.get(i, name) for i, name in ((1, "input"), (2, "other"))]
    if all(isinstance(one, Slot) for one in choices) and len(call.tensors) == 3:
        found.append(linear_in(call, [one.number for one in choices]))
    return found


enter(where, forms("where"))
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
