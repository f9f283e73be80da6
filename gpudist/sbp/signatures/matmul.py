"""Matrix products: ``matmul``, ``mm``, ``bmm`` and ``linear``."""

from __future__ import annotations

import torch

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp.registry import Call, SbpSignature, compose, forms, on_meta, register
from gpudist.sbp.signatures.elementwise import aligned


def _batch(call: Call) -> list[SbpSignature]:
    """Return a signature for each batch dim of the result."""
    left, right = call.shapes[:2]
    if len(left) == 1 or len(right) == 1:
        batch = (left if len(right) == 1 else right)[:-2] if max(len(left), len(right)) > 2 else ()
    else:
        batch = call.outputs[0].shape[:-2]
    found: list[SbpSignature] = []
    for dim in range(len(batch)):
        inputs = tuple(
            aligned(shape[:-2], dim, batch) if len(shape) > 2 else broadcast
            for shape in (left, right)
        )
        found.append(SbpSignature(inputs, (split(dim),)))
    return found


def _bilinear() -> list[SbpSignature]:
    return [
        SbpSignature((partial_sum, broadcast), (partial_sum,)),
        SbpSignature((broadcast, partial_sum), (partial_sum,)),
    ]


_PRODUCTS = forms("matmul", "mm", "bmm", "mv", "dot", "__matmul__")


@register(*_PRODUCTS, torch.linalg.matmul, any_cuts=True)
def matmul(call: Call, parts: int) -> list[SbpSignature]:
    """Split rows, columns or batch dims; a split of the summed dim gives terms."""
    left, right = call.shapes
    dims = call.outputs[0].dims
    found: list[SbpSignature] = []
    if len(left) > 1:
        row = dims - 1 if len(right) == 1 else dims - 2
        found.append(SbpSignature((split(len(left) - 2), broadcast), (split(row),)))
    if len(right) > 1:
        found.append(SbpSignature((broadcast, split(len(right) - 1)), (split(dims - 1),)))
    summed = split(max(len(right) - 2, 0))
    found.append(SbpSignature((split(len(left) - 1), summed), (partial_sum,)))
    return [*found, *_batch(call), *_bilinear()]


def _linear_of_shapes(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    fits = weight.dim() == 2 and input.shape[-1:] == weight.shape[1:]
    if not fits or input.dtype != weight.dtype:
        return torch.nn.functional.linear(input, weight, bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


on_meta[torch.nn.functional.linear] = _linear_of_shapes


@register(torch.nn.functional.linear, any_cuts=True)
def linear(call: Call, parts: int) -> list[SbpSignature]:
    """Split like ``x @ weight.T``; if the result is in terms, the bias must be too."""
    x = call.tensors[0].dims
    dims = call.outputs[0].dims
    out: Sbp = split(dims - 1)
    found = [SbpSignature((split(d), broadcast), (split(d),)) for d in range(x - 1)]
    if call.tensors[1].dims == 2:
        found.append(SbpSignature((broadcast, split(0)), (out,)))
    found.append(SbpSignature((split(x - 1), split(call.tensors[1].dims - 1)), (partial_sum,)))
    found += _bilinear()
    if len(call.tensors) == 2:
        return found
    bias = {out: split(0), partial_sum: partial_sum}
    return [SbpSignature((*s.inputs, bias.get(s.outputs[0], broadcast)), s.outputs) for s in found]


@compose(torch.Tensor.__rmatmul__)
def swapped_matmul(right: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return torch.matmul(left, right)
