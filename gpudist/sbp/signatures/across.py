"""Communication between the blocks of an operator: sums, maxima, and stacked blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from gpudist.exchange.autograd import all_reduce_constant
from gpudist.geometry.layout import Layout, NdSbp, broadcast, partial_sum, split
from gpudist.sbp.boxing import box
from gpudist.sbp.call import Call, Compute
from gpudist.sbp.registry import SbpSignature, Where
from gpudist.world.partition import CartesianPartition


def axes_that_split(where: Where, slot: int, dims: Collection[int]) -> list[int]:
    """Return the axes that split one of ``dims`` of the tensor in ``slot`` over several workers."""
    attributes = zip(where.sbps[slot], where.P.shape, strict=True)
    return [
        axis for axis, (attribute, n) in enumerate(attributes) if attribute.dim in dims and n > 1
    ]


def total(x: torch.Tensor, where: Where, axes: Iterable[int]) -> torch.Tensor:
    """All-reduce blocks of equal shape over ``axes``. Self-adjoint."""
    P = _workers(where, axes)
    return _boxed(x, P, x.shape, (partial_sum,)) if P.size > 1 and x.numel() else x


def largest(x: torch.Tensor, where: Where, axes: Iterable[int]) -> torch.Tensor:
    """Return the cell-wise maximum of blocks of equal shape over ``axes``, without a gradient."""
    P = _workers(where, axes)
    return all_reduce_constant(x.detach(), P, "max") if P.size > 1 and x.numel() else x.detach()


def stack_blocks(x: torch.Tensor, where: Where, axes: Iterable[int]) -> torch.Tensor:
    """All-gather blocks of equal shape over ``axes`` along a new first dim, in block order.

    Adjoint:
        Each worker receives the sum of the gradients of its block.
    """
    P = _workers(where, axes)
    if P.size == 1 or not x.numel():
        return x.expand(P.size, *x.shape)
    return _boxed(x.unsqueeze(0), P, (P.size, *x.shape), (split(0),))


def place(where: Where, axes: Iterable[int]) -> int:
    """Return the position of this worker's block in the result of :func:`stack_blocks`."""
    rank = _workers(where, axes).rank
    assert rank is not None
    return rank


def _workers(where: Where, axes: Iterable[int]) -> CartesianPartition:
    return where.P.along(list(axes))


def _boxed(
    x: torch.Tensor, P: CartesianPartition, shape: Iterable[int], sbp: NdSbp
) -> torch.Tensor:
    source = Layout(P.ranks, (P.size,), sbp, tuple(shape))
    target = Layout(P.ranks, (P.size,), (broadcast,), source.shape)
    return box(x.contiguous(), source, target, P.world)


class _Together(torch.autograd.Function):
    """Identity of several tensors whose backward waits for all their gradients."""

    @staticmethod
    def forward(ctx: Any, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def in_one_order(compute: Compute) -> Compute:
    """Return ``compute`` whose gradients continue in the same order on all workers.

    Workers need this if some compute without cells, by other nodes of the graph, because messages
    of backward follow the order of the graph.
    """

    def compute_in_order(tensors: Sequence[torch.Tensor]) -> Any:
        learning = [i for i, x in enumerate(tensors) if x.requires_grad]
        if len(learning) < 2 or not torch.is_grad_enabled():
            return compute(tensors)
        tied = list(tensors)
        for i, x in zip(learning, _Together.apply(*(tensors[i] for i in learning)), strict=True):
            tied[i] = x
        return compute(tied)

    return compute_in_order


def terms(call: Call, *slots: int) -> list[SbpSignature]:
    """Return the signature with terms in ``slots``, in which the function is jointly linear."""
    if any(call.tensors[i].dtype == torch.bool for i in slots):
        return []
    inputs = tuple(partial_sum if i in slots else broadcast for i in range(len(call.tensors)))
    return [SbpSignature(inputs, (partial_sum,))]
