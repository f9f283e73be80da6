"""Check that movements can read the memory of a tensor, and explain why not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.errors import GpudistError, ShapeError

# Value of __torch_dispatch__ in subclasses that leave their operations to torch.
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
# Subclasses in torch whose operations would misinterpret the values that a movement returns.
_SUBCLASSES = {
    "MaskedTensor": "give its data by .get_data(), and the mask beside it",
}
# Substrings of torch's errors about dtypes.
_ABOUT_DTYPES = (
    "dtype", "data type", "scalar type", "not implemented for", "not supported",
    "should be the same", "omplex", "integer", "loating", "Long", "Bool", "Half",
)  # fmt: skip
# Torch's words, and gpudist's, for a tensor whose dtype another one or a kernel does not take.
_WRONG_DTYPE = re.compile(
    "same d(ata)?type|should be the same|scalar type |not implemented for|Type promoting"
    "|infer output dtype|a floating dtype"
)
_USUAL = (torch.float32, torch.float64)
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Errors that torch raises for tensors that an operation does not accept.
TORCH_ERRORS = (
    RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError,
    AssertionError, ArithmeticError,
)  # fmt: skip


def on_meta(what: str, shape: Iterable[int], dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor of ``shape`` without memory.

    Raises:
        ShapeError: its cells or bytes cannot be counted in 64 bits; ``what`` names it.
    """
    extents = tuple(shape)
    try:
        return torch.empty(extents, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise ShapeError(
            f"{what} of shape {list(extents)} has more bytes than 64 bits can count; give smaller "
            "sizes"
        ) from None


# Dtypes that every transport carries.
MOVED_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
BATCHED_GRADIENTS = (
    "batched gradients (is_grads_batched=True, vmap) cannot be moved; loop over the gradients"
)


def dtype_refusal(dtype: torch.dtype | None) -> str:
    """Return why a tensor of this dtype, if it is known, cannot be moved."""
    known = ", ".join(str(known).removeprefix("torch.") for known in MOVED_DTYPES)
    return (
        f"{'its dtype' if dtype is None else f'dtype {dtype}'} cannot be moved, only {known}; "
        "convert the tensor, or, for operators that add nothing, move its bytes with "
        "x.view(torch.uint8)"
    )


def storage_problem(x: torch.Tensor) -> str:
    """Return why ``x`` cannot be moved and what to do; empty for strided memory on any device."""
    if type(x) not in PLAIN and type(x).__name__ in _SUBCLASSES:
        return f"a {type(x).__name__} cannot be moved; {_SUBCLASSES[type(x).__name__]}"
    if x.is_nested:
        return f"a nested tensor cannot be moved; {_REMEDIES[torch.jagged]}"
    if not is_dynamo_compiling() and _is_legacy_batched(x):
        return BATCHED_GRADIENTS
    if x.layout is not torch.strided and isinstance(x.layout, torch.layout):
        remedy = _REMEDIES.get(x.layout, "give a tensor of layout torch.strided")
        return f"a tensor of layout {x.layout} cannot be moved; {remedy}"
    if x.is_quantized:
        return f"a quantized tensor ({x.dtype}) cannot be moved; call .dequantize() or .int_repr()"
    return ""


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, materialized if torch stores it as a lazy conjugate, negation or zero.

    Raises:
        ShapeError: ``x`` has no memory, such as a fake tensor.
    """
    if x.is_conj() or x.is_neg():
        x = x.detach().resolve_conj().resolve_neg()
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
    if type(x) not in PLAIN and getattr(type(x), "__torch_dispatch__", None) is not _NO_OPERATIONS:
        raise ShapeError(f"a {type(x).__name__} has no memory of its own that can be read here")
    return x


def explain(where: str, error: Exception, arguments: Iterable[object]) -> None:
    """Raise a clearer error if an unusual tensor among the arguments explains ``error``.

    Args:
        where: name of the layer or function that raised.
        error: error raised by torch.
        arguments: arguments of the call.

    Raises:
        ShapeError: a tensor cannot be moved, or the layer does not support its dtype or shape.
    """
    if isinstance(error, GpudistError | torch.OutOfMemoryError):
        return
    problems = [_problem_with(x, error) for x in arguments if isinstance(x, torch.Tensor)]
    problem = next(filter(None, problems), "")
    if problem:
        first = str(error).partition("\n")[0]
        raise ShapeError(f"{where}: {problem} ({type(error).__name__}: {first:.200})") from error


def _problem_with(x: torch.Tensor, error: Exception) -> str:
    """Return how ``x`` may have caused ``error``; empty if the user's code may have raised it."""
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


def is_about_dtypes(error: Exception) -> bool:
    """Return whether an error says that the dtype of a tensor does not fit."""
    return bool(_WRONG_DTYPE.search(str(error)))


def dtype_remedy(dtypes: Sequence[torch.dtype]) -> str:
    """Return how to convert the first of several tensors to the dtype that the others have.

    The result is empty if the first tensor has this dtype. A single tensor is to be ``float32``.
    """
    first = dtypes[0]
    floats = (dtype for dtype in dtypes[1:] if dtype.is_floating_point or dtype.is_complex)
    expected = next(floats, torch.float32)
    if first == expected:
        return ""
    convert = "x.float()" if expected == torch.float32 else f"x.to({expected})"
    autocast = ", or use torch.autocast" if first.is_floating_point else ""
    return f"the input has dtype {first}, expected {expected}; pass {convert}{autocast}"


def storage_refusal(where: str, arguments: Iterable[object]) -> ShapeError | None:
    """Return an error if a tensor among the arguments has no strided memory."""
    for x in arguments:
        if isinstance(x, torch.Tensor) and (problem := storage_problem(x)):
            return ShapeError(f"{where}: {problem}")
    return None
