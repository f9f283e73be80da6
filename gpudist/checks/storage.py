"""Which tensors have memory that a movement can read, and why others are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gpudist.errors import GpudistError, ShapeError

# Of a subclass that leaves its operations to torch.
_NO_OPERATIONS: Any = torch._C._disabled_torch_dispatch_impl  # pyright: ignore
_is_legacy_batched: Any = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore

_REMEDIES = {
    torch.sparse_coo: "call .to_dense()",
    torch.sparse_csr: "call .to_dense()",
    torch.sparse_csc: "call .to_dense()",
    torch.sparse_bsr: "call .to_dense()",
    torch.sparse_bsc: "call .to_dense()",
    torch._mkldnn: "call .to_dense()",  # pyright: ignore
    torch.jagged: "give its .values(), or pad it with torch.nested.to_padded_tensor",
}
# Of torch's, with operations that would take a movement's numbers for something else.
_SUBCLASSES = {
    "MaskedTensor": "give its data by .get_data(), and the mask beside it",
}
# Words of what torch raises of dtypes.
_ABOUT_DTYPES = (
    "dtype", "data type", "scalar type", "not implemented for", "not supported",
    "should be the same", "omplex", "integer", "loating", "Long", "Bool", "Half",
)  # fmt: skip
_USUAL = (torch.float32, torch.float64)
PLAIN = (torch.Tensor, torch.nn.Parameter)
# What torch raises of tensors that an operation does not take.
TORCH_ERRORS = (
    RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError,
    AssertionError, ArithmeticError,
)  # fmt: skip


def storage_problem(x: torch.Tensor) -> str:
    """Why ``x`` cannot be moved, and what to do; empty for strided memory on any device."""
    if type(x) not in PLAIN and type(x).__name__ in _SUBCLASSES:
        return f"a {type(x).__name__} cannot be moved; {_SUBCLASSES[type(x).__name__]}"
    if x.is_nested:
        return f"a nested tensor cannot be moved; {_REMEDIES[torch.jagged]}"
    if _is_legacy_batched(x):
        return (
            "batched gradients (is_grads_batched=True, vmap) cannot be moved; loop over the "
            "gradients"
        )
    if x.layout is not torch.strided and isinstance(x.layout, torch.layout):
        remedy = _REMEDIES.get(x.layout, "give a tensor of layout torch.strided")
        return f"a tensor of layout {x.layout} cannot be moved; {remedy}"
    if x.is_quantized:
        return f"a quantized tensor ({x.dtype}) cannot be moved; call .dequantize() or .int_repr()"
    return ""


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """``x``, or an equal tensor where torch keeps ``x`` as a rule: conjugated, negated or zero.

    Raises:
        ShapeError: it has no memory, as one that is fake.
    """
    if x.is_conj() or x.is_neg():
        x = x.detach().resolve_conj().resolve_neg()
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
    if type(x) not in PLAIN and getattr(type(x), "__torch_dispatch__", None) is not _NO_OPERATIONS:
        raise ShapeError(f"a {type(x).__name__} has no memory of its own to be read here")
    return x


def explain(where: str, error: Exception, given: Iterable[object]) -> None:
    """Raise what torch's ``error`` means, if an unusual tensor among the arguments explains it.

    Args:
        where: the layer or function that raised it.
        given: its arguments.

    Raises:
        ShapeError: a tensor that was given cannot be moved, or is of a dtype that the layer does
            not compute with.
    """
    if isinstance(error, GpudistError | torch.OutOfMemoryError):
        return
    problems = [_problem_with(x, error) for x in given if isinstance(x, torch.Tensor)]
    problem = next(filter(None, problems), "")
    if problem:
        first = str(error).partition("\n")[0]
        raise ShapeError(f"{where}: {problem} ({type(error).__name__}: {first:.200})") from error


def _problem_with(x: torch.Tensor, error: Exception) -> str:
    """What ``error`` is about, if it can be about ``x``; other errors may be the user's own."""
    problem = storage_problem(x)
    if problem:
        return problem
    if type(x).__name__ == "DTensor":
        return "give a DTensor's block by .to_local(), or a global tensor by sbp.from_dtensor"
    if x.is_meta:
        return "a tensor on the meta device has no cells"
    if not isinstance(error, RuntimeError | TypeError | IndexError | ArithmeticError):
        return ""
    if x.dim() == 0 or x.numel() == 0:
        return f"it does not take a tensor of shape {list(x.shape)}"
    if x.dtype not in _USUAL and any(words in str(error) for words in _ABOUT_DTYPES):
        return f"it does not take {x.dtype} here; convert the tensor to the dtype of the layer"
    return ""


def storage_refusal(where: str, given: Iterable[object]) -> ShapeError | None:
    """The refusal of a tensor among the arguments that has no strided memory, if there is one."""
    for x in given:
        if isinstance(x, torch.Tensor) and (problem := storage_problem(x)):
            return ShapeError(f"{where}: {problem}")
    return None
