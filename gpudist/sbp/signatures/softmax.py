"""Softmax along a dim, which may be split: it needs one maximum and one sum for each line."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import split
from gpudist.nn.norm.softmax import largest_of_block, softmax_of_lines
from gpudist.sbp.call import Call
from gpudist.sbp.registry import SbpSignature, Where, compose, forms, register
from gpudist.sbp.signatures.across import axes_that_split, largest, total


def _dim(call: Call) -> int:
    dims = call.tensors[0].dims
    dim = call.get(1, "dim")
    if dim is None:
        # torch's default for an omitted dim, which it warns about.
        return 0 if dims in (0, 1, 3) else 1
    most = max(dims, 1)
    if not -most <= dim < most:
        # Torch's function does not look at the dim of a meta tensor.
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got "
            f"{dim})"
        )
    return dim % most


@register(*forms("softmax", "log_softmax"), any_cuts=True)
def softmax(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split of ``dim`` communicates."""
    dim = _dim(call)
    dims = range(call.tensors[0].dims)
    return [SbpSignature((split(d),), (split(d),), run=_run if d == dim else None) for d in dims]


def _run(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    (x,), dim = tensors, _dim(where.call)
    axes = axes_that_split(where, 0, (dim,))
    # It comes third in torch.softmax, and fourth in torch.nn.functional.softmax.
    options = (*call.args[2:], *call.kwargs.values())
    dtype = next((option for option in options if isinstance(option, torch.dtype)), x.dtype)
    x = x.to(torch.promote_types(dtype, torch.float32))
    largest_cells = largest(largest_of_block(x, dim), where, axes)
    is_log = call.function.__name__.endswith("log_softmax")
    y = softmax_of_lines(x, dim, largest_cells, lambda sums: total(sums, where, axes), is_log)
    return y.to(dtype)


@compose(F.softmin)
def softmin(
    input: torch.Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return F.softmax(-input, dim, _stacklevel, dtype)
