"""Conversion of stored tensors to the dtype of the tensors that they fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from gpudist.checks.arguments import describe
from gpudist.checks.storage import storage_problem
from gpudist.errors import CheckpointError

_WHOLE = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def dtype_problem(stored: torch.dtype, wanted: torch.dtype) -> str:
    """Return why no tensor can be converted, for example a complex one to real numbers, or ``""``.

    Booleans become any number, integers integers of another size, floating-point or complex
    numbers, floating-point numbers others or complex ones.
    """
    if stored == wanted:
        return ""
    are_numbers = all(d in _WHOLE or d.is_floating_point or d.is_complex for d in (stored, wanted))
    # Integers 0 and 1 become booleans, which torch would refuse.
    target = torch.uint8 if wanted == torch.bool else wanted
    if not are_numbers or not torch.can_cast(stored, target):
        return f"has {stored}, which does not convert to {wanted}; use the same dtype"
    return ""


def require_dict(state_dict: object) -> Mapping[Any, Any]:
    """Return the state dict that the root passed.

    Raises:
        CheckpointError: if it is not a dict.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"the root passed {describe(state_dict)} as state_dict, not a dict; only the other "
            "ranks may pass None"
        )
    return cast(Any, state_dict)


def require_cells(x: torch.Tensor, what: str) -> None:
    """Raise if ``x``, which ``what`` names, cannot be read.

    Raises:
        CheckpointError: if it has no strided memory, or is on the meta device.
    """
    problem = "a tensor on meta has no cells; load it on the CPU" if x.is_meta else ""
    if problem := storage_problem(x) or problem:
        raise CheckpointError(f"{what}: {problem}")


def convert_dtype(x: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Convert ``x`` to ``dtype``, rounding floating-point numbers.

    Args:
        x: tensor on any device.
        dtype: dtype of the result.
        what: name of the tensor for errors.

    Raises:
        CheckpointError: if :func:`dtype_problem` has one, an integer or boolean has no equal in
            ``dtype``, a finite number exceeds the range of ``dtype``, or ``x`` cannot be read.
    """
    require_cells(x, what)
    if x.dtype == dtype:
        return x
    problem = dtype_problem(x.dtype, dtype)
    if problem:
        raise CheckpointError(f"{what} {problem}")
    if dtype.is_complex:
        real = dtype.to_real()
        if x.is_complex():
            return torch.view_as_complex(convert_dtype(torch.view_as_real(x), real, what))
        return convert_dtype(x, real, what).to(dtype)
    y = x.to(dtype)
    fits = _is_at_most_rounded(x, y) if x.is_floating_point() else _is_unchanged(x, y)
    if not bool(fits.all()):
        at = int(fits.reshape(-1).to(torch.uint8).argmin())
        raise CheckpointError(
            f"{what} has {x.dtype} and contains {x.reshape(-1)[at].item()}, which {dtype} cannot "
            f"hold; use {x.dtype}, or another dtype that can"
        )
    return y


def _wide(x: torch.Tensor) -> torch.Tensor:
    # Torch has few operations for dtypes of one byte.
    return x.float() if x.dtype.itemsize == 1 else x


def _is_at_most_rounded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, wide = _wide(x), _wide(y)
    near = (x.isfinite() == wide.isfinite()) & (x.isnan() == wide.isnan())
    if y.dtype.itemsize == 1:
        # Torch replaces a number beyond the range of these dtypes by the largest one.
        near &= (x.abs() <= torch.finfo(y.dtype).max) | ~x.isfinite()
    return near


def _is_unchanged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return where integers or booleans are unchanged by the conversion to ``y`` and back."""
    equal = y.to(x.dtype) == x
    if x.dtype == torch.bool:
        return equal
    if y.is_floating_point():
        # A float beyond the range of the integers may convert back to the largest of them.
        bits = 8 * x.dtype.itemsize - x.dtype.is_signed
        equal &= _wide(y).isfinite() & (_wide(y) < 2.0**bits)
    elif y.dtype in _WHOLE and x.dtype.is_signed != y.dtype.is_signed:
        # Between signed and unsigned integers of one size, the bits alone return.
        equal &= (x if x.dtype.is_signed else y) >= 0
    return equal
