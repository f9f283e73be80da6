"""Broadcasts and sum-reduces of shapes known only at run time, beside static ones.

The examples are the eight by which DistDL documents its rules, and their mirrors.
"""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gpudist import nn, zero_volume_tensor
from gpudist.errors import PartitionError, PlanMismatch
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, cells, compare_every_call, partition_of
from tests.pool import distributed


class Example(NamedTuple):
    """A grid that broadcasts to a finer one; ``transposed`` is the one of the two that is."""

    coarse: tuple[int, ...]
    fine: tuple[int, ...]
    transposed: str = ""


EXAMPLES = {
    1: Example((1,), (4,)),
    2: Example((1,), (2, 3)),
    3: Example((3, 1), (3, 4)),
    4: Example((1, 1, 3), (2, 2, 3)),  # [4, 4, 3] in the document, which 48 ranks take
    6: Example((1, 3), (3, 1), "coarse"),
    7: Example((1, 3), (3, 4), "coarse"),
    8: Example((4, 1), (3, 4), "fine"),
}
REFUSED = {5: Example((1, 1, 3), (3, 3, 2)), 6: Example((1, 3), (3, 1))}
every_example = pytest.mark.parametrize("number", EXAMPLES)

# Tensors of successive calls: size, dtype and number of dims change every time.
CALLS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((2, 3), torch.float32),
    ((5,), torch.int64),
    ((1, 2, 1, 3), torch.float64),
    ((), torch.float32),
    ((4, 2, 1), torch.complex64),
    ((0, 3), torch.float64),
    ((3, 2, 2), torch.bfloat16),
    ((1, 1, 2, 1, 2, 1, 1, 3), torch.uint8),
    ((2, 3), torch.float64),
]


def partitions(P_world: Partition, example: Example) -> tuple[Any, Any]:
    """The coarse one on the last ranks, backwards, and the fine one on the first."""
    last = range(P_world.size - 1, -1, -1)
    coarse = partition_of(P_world, list(last)[: int(np.prod(example.coarse))], example.coarse)
    return coarse, partition_of(P_world, range(int(np.prod(example.fine))), example.fine)


def owners(P_coarse: Any, P_fine: Any, example: Example) -> dict[int, int]:
    """World rank of each worker of the fine grid -> of the worker it is paired with, by NumPy."""
    grid = np.reshape(P_coarse.ranks, example.coarse)
    if example.transposed == "coarse":
        paired = np.broadcast_to(grid.T, example.fine)
    elif example.transposed == "fine":
        paired = np.broadcast_to(grid, example.fine[::-1]).T
    else:
        paired = np.broadcast_to(grid, example.fine)
    return dict(zip(P_fine.ranks, map(int, paired.ravel()), strict=True))


def broadcast_of(P_coarse: Any, P_fine: Any, example: Example, **options: Any) -> nn.Broadcast:
    return nn.Broadcast(
        P_coarse, P_fine, example.transposed == "coarse", example.transposed == "fine", **options
    )


def sum_reduce_of(P_coarse: Any, P_fine: Any, example: Example, **options: Any) -> nn.SumReduce:
    return nn.SumReduce(
        P_fine, P_coarse, example.transposed == "fine", example.transposed == "coarse", **options
    )


def block(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    return cells(shape, dtype) + torch.tensor(rank, dtype=dtype)


def differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def check_broadcasts(P_world: Partition, example: Example) -> None:
    """Shape, dtype and ``requires_grad`` of placeholders are ignored."""
    P_x, P_y = partitions(P_world, example)
    owner = owners(P_x, P_y, example)
    layer = broadcast_of(P_x, P_y, example, shape="dynamic")
    rank = P_world.rank
    for shape, dtype in CALLS:
        x = block(shape, dtype, rank) if P_x.active else zero_volume_tensor()
        if P_x.active:
            x.requires_grad_(differentiable(dtype))
        y = layer(x)
        if rank in owner:
            assert_same(y.detach(), block(shape, dtype, owner[rank]))
        takes_part = P_x.active or P_y.active
        assert y.requires_grad == (takes_part and differentiable(dtype))
        if not y.requires_grad:
            continue
        y.backward(torch.full(y.shape, 1.0 + rank, dtype=y.dtype))
        if P_x.active:
            total = sum(1.0 + r for r, source in owner.items() if source == rank)
            assert_same(x.grad, torch.full(shape, total, dtype=dtype))


def check_sums(P_world: Partition, example: Example) -> None:
    P_y, P_x = partitions(P_world, example)
    owner = owners(P_y, P_x, example)
    layer = sum_reduce_of(P_y, P_x, example, shape="dynamic")
    rank = P_world.rank
    for shape, dtype in CALLS:
        x = block(shape, dtype, rank) if P_x.active else zero_volume_tensor()
        if P_x.active:
            x.requires_grad_(differentiable(dtype))
        y = layer(x)
        if P_y.active:
            summands = [block(shape, dtype, r) for r, root in owner.items() if root == rank]
            expected = torch.stack(summands).to(torch.complex128 if dtype.is_complex else dtype)
            assert_same(y.detach(), expected.sum(0, dtype=dtype))
        takes_part = P_x.active or P_y.active
        assert y.requires_grad == (takes_part and differentiable(dtype))
        if not y.requires_grad:
            continue
        y.backward(torch.full(y.shape, 1.0 + rank, dtype=y.dtype))
        if P_x.active:
            assert_same(x.grad, torch.full(shape, 1.0 + owner[rank], dtype=dtype))


@every_example
@distributed(ranks=12)
def test_broadcast_examples(P_world: Partition, number: int) -> None:
    check_broadcasts(P_world, EXAMPLES[number])


@every_example
@distributed(ranks=12)
def test_sum_reduce_examples(P_world: Partition, number: int) -> None:
    check_sums(P_world, EXAMPLES[number])


@distributed(ranks=48, transports=["loopback"])
def test_example_4_as_it_is_documented(P_world: Partition) -> None:
    check_broadcasts(P_world, Example((1, 1, 3), (4, 4, 3)))
    check_sums(P_world, Example((1, 1, 3), (4, 4, 3)))


@pytest.mark.parametrize("number", REFUSED)
@distributed(ranks=18, transports=["loopback"])
def test_examples_that_do_not_broadcast(P_world: Partition, number: int) -> None:
    example = REFUSED[number]
    P_coarse, P_fine = partitions(P_world, example)
    for make in (broadcast_of, sum_reduce_of):
        with pytest.raises(PartitionError, match=r"does not (broadcast|reduce)"):
            make(P_coarse, P_fine, example, shape="dynamic")


CHANGES: dict[str, torch.Tensor] = {
    "size": torch.ones(2, 4),
    "batch": torch.ones(3, 3),
    "dtype": torch.ones(2, 3, dtype=torch.int64),
    "rank": torch.ones(2, 3, 1),
    "no cells": torch.ones(0, 3),
}
REASON = {
    "size": r"\[2, 3\] and is now .*\[2, 4\]|bytes",
    "batch": r"bytes|\[2, 3\]",
    "dtype": "int64",
    "rank": r"\[2, 3\] and is now \[2, 3, 1\]",
    "no cells": r"\[2, 3\] and is now \[0, 3\]|bytes",
}
# Each change in the first example, and the others take turns.
changes_in_examples = pytest.mark.parametrize(
    "number, change",
    [(1, change) for change in CHANGES]
    # Without cells nothing is sent: further from the owner, only the deadline tells.
    + [(n, list(CHANGES)[n % 4]) for n in EXAMPLES if n != 1],
)


def refuses_on_every_rank(P_world: Partition, layer: Any, change: str) -> None:
    """Change one owner's block without informing the others; every rank raises."""
    compare_every_call(P_world)
    x = torch.ones(2, 3) if layer.P_x.active else zero_volume_tensor()
    # The whole loop, since a slow rank may detect the change during an earlier call.
    with pytest.raises(PlanMismatch, match=REASON[change]):
        P_world.barrier()
        layer(x)
        layer(x)
        layer(CHANGES[change] if layer.P_x.rank == 0 else x)
        P_world.barrier()


@changes_in_examples
@distributed(ranks=12)
def test_static_broadcasts_refuse(P_world: Partition, number: int, change: str) -> None:
    example = EXAMPLES[number]
    layer = broadcast_of(*partitions(P_world, example), example)
    refuses_on_every_rank(P_world, layer, change)


@changes_in_examples
@distributed(ranks=12)
def test_static_sum_reduces_refuse(P_world: Partition, number: int, change: str) -> None:
    example = EXAMPLES[number]
    layer = sum_reduce_of(*partitions(P_world, example), example)
    refuses_on_every_rank(P_world, layer, change)


@pytest.mark.parametrize("change", CHANGES)
@distributed(ranks=4)
def test_dynamic_summands_must_agree(P_world: Partition, change: str) -> None:
    """Refused before the first message: the world goes on, and the next call is right."""
    layer = nn.SumReduce(P_world, P_world.create_partition_inclusive([3]), shape="dynamic")
    with pytest.raises(PlanMismatch):
        layer(CHANGES[change] if P_world.rank == 2 else torch.ones(2, 3))
    P_world.barrier()
    y = layer(CHANGES[change])
    if P_world.rank == 3:
        assert_same(y, 4 * CHANGES[change])
