"""Operators that split an invariant value, or gather one from blocks.

See :mod:`gpudist.nn.tensor_parallel.invariant`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.checks.arguments import checked
from gpudist.exchange import Movement
from gpudist.exchange.autograd import Declared, apply_with_adjoint, move, move_without_node
from gpudist.exchange.tracing import is_recorded
from gpudist.nn.norm.line_blocks import LineBlocks
from gpudist.nn.tensor_parallel.conventions import mark_result
from gpudist.nn.tensor_parallel.invariant import copy_once, expect_of_member
from gpudist.ops.operator import cached_operator
from gpudist.world.partition import Partition


@checked()
def invariant_gather(
    x: torch.Tensor, P: Partition, dim: int = -1, *, lengths: Sequence[int] | int | None = None
) -> torch.Tensor:
    """Gather the blocks of the workers of ``P`` into one value that counts once.

    Collective over ``P``. Megatron's "gather from" region.

    Args:
        x: this worker's block.
        P: partition of the workers, in the order of their blocks.
        dim: dim along which ``x`` is split.
        lengths: lengths of all blocks in that dim, or their sum if they are balanced; by default,
            the workers exchange them at each call.

    Returns:
        New tensor with the full value, the same on all workers.

    Adjoint:
        By declaration, this worker's block of the gradient; :func:`invariant_scatter` in double
        backward.

    Cost:
        An all-gather; no communication in backward.

    Raises:
        PartitionError: this worker is not in ``P``.
        ShapeError: the block does not fit the lengths.
        ConventionError: the block is already an invariant value.
    """
    expect_of_member("invariant_gather", "dual", x, P)
    blocks = cached_operator(LineBlocks, P, ("invariant_gather",))
    dim %= x.dim()
    if lengths is None:
        lengths = [row[0] for row in P.allgather_data([x.shape[dim]])]
    movement, own = _movement_and_own(
        blocks, x, dim, blocks.require_lengths(x, dim, lengths, False)
    )
    return mark_result(gather_once(x, movement, dim, own), "invariant_gather", P)


@checked()
def invariant_scatter(
    x: torch.Tensor, P: Partition, dim: int = -1, *, lengths: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this worker's block of a value that is the same on all workers of ``P``.

    Collective over ``P`` in backward. Megatron's "scatter to" region.

    Args:
        x: value, the same on all workers.
        P: partition of the workers, in the order of their blocks.
        dim: dim along which to split it.
        lengths: lengths of all blocks in that dim, balanced by default.

    Returns:
        New tensor: this worker's block.

    Adjoint:
        By declaration, :func:`invariant_gather`.

    Cost:
        None in forward; an all-gather in backward.

    Raises:
        PartitionError: this worker is not in ``P``.
        ShapeError: the value does not fit the lengths.
        ConventionError: the value is a part, or a copy whose gradients add up.
    """
    expect_of_member("invariant_scatter", "invariant", x, P)
    blocks = cached_operator(LineBlocks, P, ("invariant_scatter",))
    dim %= x.dim()
    y = cut_unchecked(x, blocks, dim, blocks.require_lengths(x, dim, lengths, True))
    return mark_result(y, "invariant_scatter", P)


@checked()
def invariant_share(x: torch.Tensor, P: Partition) -> torch.Tensor:
    """Convert a value of which each worker of ``P`` holds a copy to one that counts once.

    This converts from the dual gradient convention, in which the gradients of copies add up, to the
    invariant convention. :func:`~gpudist.nn.invariant_copy` converts back.

    Args:
        x: value, the same on all workers.
        P: partition of the workers that hold it.

    Returns:
        New tensor equal to ``x``.

    Adjoint:
        By declaration, an equal share of the gradient on each worker, and the identity in double
        backward: the shares add up to the gradient.

    Cost:
        None.

    Raises:
        PartitionError: this worker is not in ``P``.
        ConventionError: the value is already invariant.
    """
    expect_of_member("invariant_share", "dual", x, P)
    if is_recorded():
        return _with_share_of_gradient(x, P.size)
    y = apply_with_adjoint(
        x,
        Declared("invariant_share", "dual", "invariant", P, torch.clone),
        Declared("invariant_share", "invariant", "dual", P, lambda gradient: gradient / P.size),
    )
    return mark_result(y, "invariant_share", P)


def gather_once(
    x: torch.Tensor, movement: Movement, dim: int, own: tuple[int, int]
) -> torch.Tensor:
    """Compute :func:`invariant_gather` without checks; ``own`` is this block's start and length."""
    if is_recorded():
        return _with_share_of_gradient(move((movement,), (x,))[0], movement.steps[0].partition.size)
    gathered, cut = _gathered_and_cut(movement, dim, own)
    return apply_with_adjoint(x, gathered, cut)


def _with_share_of_gradient(x: torch.Tensor, size: int) -> torch.Tensor:
    # The value equals ``x``, and the gradient is divided by ``size``, using only torch's
    # operations.
    return x / size + (x * (1 - 1 / size)).detach()


def cut_unchecked(
    x: torch.Tensor, blocks: LineBlocks, dim: int, lengths: Sequence[int]
) -> torch.Tensor:
    """Compute :func:`invariant_scatter` without checks."""
    movement, own = _movement_and_own(blocks, x, dim, lengths)
    if is_recorded():
        return copy_once(x, blocks.P).narrow(dim, *own)
    gathered, cut = _gathered_and_cut(movement, dim, own)
    return apply_with_adjoint(x, cut, gathered)


def _movement_and_own(
    blocks: LineBlocks, x: torch.Tensor, dim: int, lengths: Sequence[int]
) -> tuple[Movement, tuple[int, int]]:
    rank = blocks.P.rank or 0
    return blocks.gather(x, dim, lengths), (sum(lengths[:rank]), lengths[rank])


def _gathered_and_cut(
    movement: Movement, dim: int, own: tuple[int, int]
) -> tuple[Declared, Declared]:
    P = movement.steps[0].partition
    return (
        Declared(
            "invariant_gather",
            "dual",
            "invariant",
            P,
            lambda x: move_without_node((movement,), (x,))[0],
        ),
        Declared(
            "invariant_scatter", "invariant", "dual", P,
            lambda x: x.narrow(dim, *own).clone(memory_format=torch.contiguous_format),
        ),
    )  # fmt: skip
