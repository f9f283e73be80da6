"""Parameters held by several workers, and the sums of their gradients over these workers.

A replicated parameter is one value that counts once, like a loss: on each worker that holds it, its
gradient is the sum over all of them. One autograd node makes its copies, and the backward of that
node is the sum. Autograd runs nodes in reverse order of creation. So if one node for all layers is
created before any of them runs, its backward runs after all of theirs, on every rank alike.
Accumulated gradients, ``torch.autograd.grad`` and gradients of gradients need nothing more. Hooks
on the parameters, or a callback at the end of backward, would have to determine what a backward
adds to ``grad``, and would miss gradients that are used elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.errors import ConventionError, ShapeError
from gpudist.exchange import Movement, bind, start
from gpudist.exchange.autograd import apply, has_tangents, is_eager, move_without_node
from gpudist.exchange.tracing import has_modes, is_recorded
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.geometry.layout import broadcast
from gpudist.nn.parameters.buckets import BUCKET_BYTES, concatenate_cells, messages
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.tensor_parallel.invariant import copy_once
from gpudist.ops.shape_agreement import refuse, reject
from gpudist.world.partition import Partition, cache_in_world


class ReplicatedParameter(NamedTuple):
    """A parameter whose gradient is summed.

    Attributes:
        number: its number, the same on all ranks.
        holders: workers over which to sum its gradient; ``None`` if there is only this one.
        order: its dims in the order of its memory, which that of its gradient and of the sum is;
            ``None`` if it is contiguous.
    """

    number: int
    holders: Partition | None
    order: tuple[int, ...] | None


def holders_of(placement: ParameterPlacement) -> Partition | None:
    """Return the workers that hold the same cells as this one; ``None`` if there are no others."""
    P = placement.P
    if not P.active or not placement.is_replicated:
        return None
    grid = P.create_cartesian_topology_partition(P.shape)
    same = grid.along(
        [axis for axis, attribute in enumerate(placement.sbp) if attribute == broadcast]
    )
    # Ascending ranks, so that layers on different grids are summed together.
    return P.world.create_partition_inclusive(sorted(same.ranks))


def copies_of(
    parameters: Sequence[torch.Tensor],
    holders: Sequence[Partition | None],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[torch.Tensor]:
    """Return copies of the parameters, from a node whose backward sums gradients over the holders.

    Collective over the holders in backward. No memory is copied.

    Args:
        parameters: parameters of layers, including placeholders; the same list on all ranks.
        holders: for each parameter, the workers that hold the same cells; ``None`` if there is only
            this one.
        bucket_bytes: maximum bytes of small gradients copied into one message.

    Adjoint:
        By declaration, the all-sum, and the identity in double backward. A parameter that gets no
        gradient on any holder has none afterwards.

    Cost:
        None in forward. In backward, one group of messages per set of holders and dtype: an
        all-reduce of each bucket of small gradients, and one of each large gradient. With NCCL,
        each is a separate group on a second stream: a bucket is filled while the previous one is
        summed. On a CPU, nothing overlaps.
    """
    copies = list(parameters)
    held = [(i, P) for i, P in enumerate(holders) if P is not None]
    if is_recorded():
        for i, P in held:
            copies[i] = copy_once(copies[i], P)
        return copies
    learns = torch.is_grad_enabled()
    replicated = [
        ReplicatedParameter(i, P, None if copies[i].is_contiguous() else _memory_order(copies[i]))
        for i, P in held
        if (learns and copies[i].requires_grad) or not is_eager()
    ]
    if replicated:
        copied = apply(
            _Copy,
            tuple(replicated),
            bucket_bytes,
            *[copies[parameter.number] for parameter in replicated],
        )
        for parameter, copy in zip(replicated, copied, strict=True):
            copies[parameter.number] = copy
    return copies


class _Copy(torch.autograd.Function):
    ends_search = True

    @staticmethod
    def forward(
        replicated: tuple[ReplicatedParameter, ...], bucket_bytes: int, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        # Save nothing: in a recomputation by checkpointing, outside the forward that made the
        # copies, the layer may create its own node. Users of a copy save it.
        ctx.replicated, ctx.bucket_bytes = inputs[:2]
        ctx.unknown = {}
        # Some parameters may have a tangent and others none.
        ctx.set_materialize_grads(has_tangents())

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([tangent.view_as(tangent) for tangent in tangents[2:]])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        results = list(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        _refuse_unknown(ctx, present)
        summed = [i for i in present if ctx.replicated[i].holders is not None]
        if summed:
            replicated = tuple([ctx.replicated[i] for i in summed])
            sums = apply(
                _GradientSumNode, replicated, ctx.bucket_bytes, *[gradients[i] for i in summed]
            )
            for i, total in zip(summed, sums, strict=True):
                results[i] = total
        return None, None, *results


def _refuse_unknown(ctx: Any, numbers: Sequence[int]) -> None:
    for i in numbers:
        if i in ctx.unknown:
            # A parameter that occurs twice keeps its first holders.
            refuse(ctx.replicated[i].holders, ConventionError(ctx.unknown[i]))


class _GradientSumNode(torch.autograd.Function):
    ends_search = True

    @staticmethod
    def forward(
        replicated: tuple[ReplicatedParameter, ...], bucket_bytes: int, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return sums_of(replicated, gradients, bucket_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.replicated, ctx.bucket_bytes = inputs[:2]

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return apply(_GradientSumNode, ctx.replicated, ctx.bucket_bytes, *tangents[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *apply(_Copy, ctx.replicated, ctx.bucket_bytes, *gradients)


def sums_of(
    replicated: Sequence[ReplicatedParameter],
    gradients: Sequence[torch.Tensor],
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients summed over their holders; not differentiable.

    Every rank visits the sets of holders in the order of the parameters' numbers, which prevents
    deadlock.
    """
    alike: dict[tuple[Partition | None, torch.dtype], list[int]] = {}
    key, numbers = None, []
    for i, (parameter, gradient) in enumerate(zip(replicated, gradients, strict=True)):
        # Most have those of the one before, and to hash a partition takes a while.
        if key is None or parameter.holders is not key[0] or gradient.dtype != key[1]:
            key = parameter.holders, gradient.dtype
            numbers = alike.setdefault(key, [])
        numbers.append(i)
    sums = list(gradients)
    # A sum whose memory is not in the parameter's order would be copied into ``grad``.
    blocks = [
        gradient if parameter.order is None else gradient.permute(parameter.order)
        for parameter, gradient in zip(replicated, gradients, strict=True)
    ]
    for (holders, dtype), chosen in alike.items():
        assert holders is not None
        if not {gradients[i].layout for i in chosen} <= {torch.strided}:
            text = "a gradient of a parameter is sparse, but sums over workers are dense"
            reject(holders, ShapeError(f"{text}: create the embedding with sparse=False"))
        parts = messages({i: gradients[i].nbytes for i in chosen}, bucket_bytes)
        movements = [
            _bind_sum(
                holders,
                dtype,
                tuple([(replicated[i].number, blocks[i].shape, replicated[i].order) for i in part]),
            )
            for part in parts
        ]
        totals = _carry_out(
            movements, (concatenate_cells([blocks[i] for i in part]) for part in parts)
        )
        for part, total in zip(parts, totals, strict=True):
            pieces = total.split([blocks[i].numel() for i in part])
            for i, piece in zip(part, pieces, strict=True):
                order, piece = replicated[i].order, piece.view(blocks[i].shape)
                sums[i] = piece if order is None else piece.permute(_inverse(order))
    return tuple(sums)


def _memory_order(x: torch.Tensor) -> tuple[int, ...] | None:
    # None if it has gaps. A dim of one cell may have any stride, and is the last.
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    order = tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
    return order if x.permute(order).is_contiguous() else None


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _carry_out(
    movements: Sequence[Movement], blocks: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    # With streams, the next bucket is filled while the previous one is in flight.
    if has_modes() or not movements[0].steps[0].partition.wire.has_streams:
        return move_without_node(movements, list(blocks))
    started = [start([m], [block]) for m, block in zip(movements, blocks, strict=True)]
    return tuple([in_flight.wait(0) for in_flight in started])


@cache_in_world
def _bind_sum(
    holders: Partition,
    dtype: torch.dtype,
    parts: tuple[tuple[int, tuple[int, ...], tuple[int, ...] | None], ...],
) -> Movement:
    cells = (sum(prod(shape) for _, shape, _ in parts),)
    plan = plan_all_sum_reduce(holders.plan_rank, range(holders.size), cells, ("gradients", parts))
    which = f"{len(parts)} gradients (parameters {parts[0][0]} to {parts[-1][0]})"
    label = f"sum of {which} over {holders.size} workers"
    return bind(plan, holders, label, dtype, cells, dtype)
