"""The invariant regions: replicated values whose gradient is taken once, not once per worker.

Everywhere else a replicated value has a gradient that is summed over its copies. A loss is the same
number
on every worker, and so is its gradient: the two operators here say so, by name.
"""

from __future__ import annotations

from typing import Any

import torch

from gpudist.errors import PartitionError
from gpudist.exchange import all_reduce
from gpudist.partition import Partition


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, P: Partition) -> torch.Tensor:
        ctx.P = P
        ctx.save_for_backward(x.new_empty(0))
        return all_reduce(x, P)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors
        return _Identity.apply(gradients[0], ctx.P), None  # pyright: ignore


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, P: Partition) -> torch.Tensor:
        ctx.P = P
        ctx.save_for_backward(x.new_empty(0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors
        return _Sum.apply(gradients[0], ctx.P), None  # pyright: ignore


def invariant_sum(x: torch.Tensor, P: Partition) -> torch.Tensor:
    """Sum ``x`` over the workers of ``P`` into one value that counts once.

    Collective over ``P``. Sums are in ascending rank order and bitwise equal on all workers.

    Args:
        x: this worker's part, of one shape on all workers.
        P: the workers that hold a part, and get the sum.

    Returns:
        New tensor: the sum.

    Adjoint:
        By declaration the identity, and the all-sum in double backward: every worker's
        ``backward()`` starts from the same loss, so the gradient of each part is the gradient of
        the loss itself.

    Cost:
        One all-reduce of ``x``; backward none.

    Raises:
        PartitionError: this worker is not in ``P``.
    """
    _require_active("invariant_sum", P)
    return _Sum.apply(x, P)  # pyright: ignore


def invariant_copy(x: torch.Tensor, P: Partition) -> torch.Tensor:
    """Hand on a value that is the same on all workers of ``P``, summing its gradient over them.

    Collective over ``P`` in backward.

    Args:
        x: the value, the same on all workers.
        P: the workers that use it.

    Returns:
        New tensor: ``x``.

    Adjoint:
        By declaration the all-sum, and the identity in double backward; the entry of a region in
        which workers compute different parts of one result.

    Cost:
        None; backward one all-reduce of the gradient.

    Raises:
        PartitionError: this worker is not in ``P``.
    """
    _require_active("invariant_copy", P)
    return _Identity.apply(x, P)  # pyright: ignore


def _require_active(name: str, P: Partition) -> None:
    if not P.active:
        raise PartitionError(f"{name}: this worker is not a member of {P!r}")
