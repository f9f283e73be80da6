"""Invariant regions: replicated values whose gradient counts once, not once per worker.

Outside invariant regions, the gradient of a replicated value is the sum over its copies. A loss,
however, is the same number on every worker, and so is its gradient. The two operators of this
module declare this. They correspond to Megatron's "reduce from" and "copy to" regions.
"""

from __future__ import annotations

from typing import Any

import torch

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError
from gpudist.exchange import all_reduce
from gpudist.exchange.autograd import Declared, all_reduce_constant, apply_with_adjoint
from gpudist.exchange.torch_library import define, handles_of, thing_of
from gpudist.exchange.tracing import is_recorded
from gpudist.nn.parameters.gradient_graph import Convention
from gpudist.nn.tensor_parallel.conventions import expect, mark_result
from gpudist.world.partition import Partition


def _remember_partition(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.partition = inputs[0]
    ctx.save_for_backward(output[-1])
    ctx.mark_non_differentiable(output[-1])


def _copy_gradient(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    (token,) = ctx.saved_tensors
    return None, torch.ops.gpudist.invariant_copy(ctx.partition, gradients[0], token)[0], None


def _sum_gradient(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    (token,) = ctx.saved_tensors
    return None, torch.ops.gpudist.invariant_sum(ctx.partition, gradients[0], token)[0], None


def _fake(partition: int, x: torch.Tensor) -> list[torch.Tensor]:
    return [x.new_empty(x.shape)]


# Variants of the operators for compiled graphs and dispatch modes.
define(
    "invariant_sum",
    "int partition, Tensor x",
    lambda partition, x: [all_reduce(x, thing_of(partition))],
    _fake,
    _copy_gradient,
    _remember_partition,
)
define(
    "invariant_copy",
    "int partition, Tensor x",
    lambda partition, x: [x.clone(memory_format=torch.contiguous_format)],
    _fake,
    _sum_gradient,
    _remember_partition,
)


@checked()
def invariant_sum(x: torch.Tensor, P: Partition) -> torch.Tensor:
    """Sum ``x`` over the workers of ``P`` into one value that counts once.

    Collective over ``P``. Sums are in ascending rank order and bitwise equal on all workers.

    Args:
        x: this worker's part, of the same shape on all workers.
        P: partition of the workers that hold a part and get the sum.

    Returns:
        New tensor with the sum.

    Adjoint:
        By declaration, the identity, and the all-sum in double backward: every worker's
        ``backward()`` starts from the same loss, so the gradient of each part is the gradient of
        the loss itself.

    Cost:
        One all-reduce of ``x``; no communication in backward.

    Raises:
        PartitionError: this worker is not in ``P``.
        ConventionError: ``x`` is an invariant value.
    """
    expect_of_member("invariant_sum", "dual", x, P)
    return mark_result(sum_once(x, P), "invariant_sum", P)


def sum_once(x: torch.Tensor, P: Partition) -> torch.Tensor:
    """Compute :func:`invariant_sum` without checks."""
    if is_recorded():
        (partition,) = handles_of(P)
        return torch.ops.gpudist.invariant_sum(partition, x, None)[0]
    return apply_with_adjoint(x, _sum_over(P), _copy_on(P))


@checked()
def invariant_copy(x: torch.Tensor, P: Partition) -> torch.Tensor:
    """Copy a value that is the same on all workers of ``P``, summing its gradient over them.

    Collective over ``P`` in backward.

    Args:
        x: value, the same on all workers.
        P: partition of the workers that use it.

    Returns:
        New tensor equal to ``x``.

    Adjoint:
        By declaration, the all-sum, and the identity in double backward. Use this operator at the
        entry of a region in which workers compute different parts of one result.

    Cost:
        None in forward; one all-reduce of the gradient in backward.

    Raises:
        PartitionError: this worker is not in ``P``.
        ConventionError: ``x`` is a part, or a copy whose gradients add up.
    """
    expect_of_member("invariant_copy", "invariant", x, P)
    return mark_result(copy_once(x, P), "invariant_copy", P)


def copy_once(x: torch.Tensor, P: Partition) -> torch.Tensor:
    """Compute :func:`invariant_copy` without checks."""
    if is_recorded():
        (partition,) = handles_of(P)
        return torch.ops.gpudist.invariant_copy(partition, x, None)[0]
    return apply_with_adjoint(x, _copy_on(P), _sum_over(P))


def _sum_over(P: Partition) -> Declared:
    return Declared(
        "invariant_sum", "dual", "invariant", P, lambda x: all_reduce_constant(x, P, "sum")
    )


def _copy_on(P: Partition) -> Declared:
    return Declared("invariant_copy", "invariant", "dual", P, torch.clone)


def expect_of_member(name: str, convention: Convention, x: torch.Tensor, P: Partition) -> None:
    """Raise if this worker is not in ``P``, or ``x`` comes from the other convention."""
    if not P.active:
        raise PartitionError(f"{name}: this worker is not a member of {P!r}")
    expect(name, convention, x, P)
