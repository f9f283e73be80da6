"""Dropout by the index of cells, in one pass over the block.

Backward draws again, from the key that forward has stored, so that no mask is kept.
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from typing import Any

import torch

from gpudist.exchange.autograd import apply
from gpudist.exchange.tracing import constant_when_traced, outside_torch
from gpudist.nn.random.cells import Cells, Key, changes_natively, draw, draw_kept

# Scale of SELU times its alpha; outputs of SELU are above the negative of this product.
_ALPHA = 1.7580993408473766


def drop_by_index(
    x: torch.Tensor, key: Key, cells: Cells, p: float, is_alpha: bool = False
) -> torch.Tensor:
    """Drop cells of ``x``, and scale the others to keep the mean.

    Args:
        x: block of the tensor.
        key: seed and number of the call.
        cells: global indices of the block's cells in the leading dims, which are dropped cell by
            cell; each such cell is dropped with all its cells in the other dims.
        p: probability of dropping a cell, between 0 and 1 exclusive.
        is_alpha: whether it is alpha dropout, see :func:`drop_cells`.

    Adjoint:
        The same cells of the gradient are dropped and scaled. They are drawn again.

    Cost:
        One pass over the block in forward and one in backward; 8 bytes are kept.
    """
    # Where few numbers are drawn, torch's conversions of float16 on a CPU are faster.
    is_slow = x.dtype == torch.float16 and len(cells.shape) < x.dim() and x.device.type == "cpu"
    if is_alpha or is_slow or not changes_natively(x):
        return drop_cells(x, draw_kept(key, cells, p, x.device), p, is_alpha)
    if x.requires_grad and torch.is_grad_enabled():
        return apply(_Drop, x, key, cells, p)
    return _scale_kept(x, key, cells, p, None)


class _Drop(torch.autograd.Function):
    """Dropout of a block, linear in it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: Key, cells: Cells, p: float) -> torch.Tensor:
        # A tensor of the seed or the call may change before backward.
        stores_key = key.stored is None and isinstance(key.call, torch.Tensor)
        stored = x.new_empty((), dtype=torch.int64) if stores_key else None
        y = _scale_kept(x, key, cells, p, stored)
        ctx.save_for_backward(key.stored if stored is None else stored)
        ctx.given = key, cells, p
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (stored,) = ctx.saved_tensors
        key, cells, p = ctx.given
        key = key if stored is None else key._replace(stored=stored)
        return drop_by_index(gradient, key, cells, p), None, None, None


def _scale_kept(
    x: torch.Tensor, key: Key, cells: Cells, p: float, stores_key: torch.Tensor | None
) -> torch.Tensor:
    y = torch.empty_like(x)
    factor = _factor(p, x.dtype)
    draw("scaled", y, key, cells, input=x, p=p, factor=factor, stores_key=stores_key)
    return y


@constant_when_traced
@lru_cache
def _factor(p: float, dtype: torch.dtype) -> float:
    # The factor preserves the mean. Torch's CPU kernel rounds it to the dtype.
    with outside_torch():
        return torch.ones((), dtype=dtype, device="cpu").div_(1 - p).item()


def drop_cells(
    x: torch.Tensor, kept: torch.Tensor, p: float, is_alpha: bool = False
) -> torch.Tensor:
    """Return ``x`` without the cells that are not ``kept``, and with others scaled.

    Dropped cells become 0, and the mean stays as it is. Alpha dropout sets them to SELU's lower
    limit, and shifts all, so that mean 0 and variance 1 stay.

    Args:
        x: block of a tensor.
        kept: bool mask of its leading dims.
        p: probability that a cell is not kept.
        is_alpha: whether it is alpha dropout.
    """
    kept = kept.view((*kept.shape, *(1,) * (x.dim() - kept.dim())))
    if not is_alpha:
        return x * kept * _factor(p, x.dtype)
    scale = 1 / sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    noise = kept.to(x.dtype)
    # The order of operations gives torch's rounding.
    shift = noise.add(-1).mul_(_ALPHA * scale).add_(_ALPHA * scale * p)
    return x * noise.mul_(scale) + shift
