"""Which tensors have memory that a movement can read."""

from __future__ import annotations

from typing import Any

import torch

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


def storage_problem(x: torch.Tensor) -> str:
    """Why ``x`` cannot be moved, and what to do; empty for strided memory on any device."""
    if x.is_nested:
        return f"a nested tensor cannot be moved; {_REMEDIES[torch.jagged]}"
    if _is_legacy_batched(x):
        return (
            "batched gradients (is_grads_batched=True, vmap) cannot be moved; loop over the "
            "gradients"
        )
    if x.layout is not torch.strided:
        remedy = _REMEDIES.get(x.layout, "give a tensor of layout torch.strided")
        return f"a tensor of layout {x.layout} cannot be moved; {remedy}"
    if x.is_quantized:
        return f"a quantized tensor ({x.dtype}) cannot be moved; call .dequantize() or .int_repr()"
    return ""


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """``x``, or an equal tensor where torch keeps ``x`` as a rule: conjugated, negated or zero."""
    if x.is_conj() or x.is_neg():
        x = x.detach().resolve_conj().resolve_neg()
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x
