"""The loss of the angle between rows that may be split."""

from __future__ import annotations

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import grid, random_like_all
from tests.nn.loss.loss_cases import check, own_part
from tests.pool import distributed

SIGNS = torch.tensor([1, -1, 1, -1, 0])


def rows(shape: tuple[int, ...]) -> list[torch.Tensor]:
    first, second = random_like_all(shape, 1), random_like_all(shape, 2)
    # Negative targets near enough to matter.
    second[1::2] += 2 * first[1::2]
    return [first, second, SIGNS[: shape[0]]]


@distributed(ranks=3, transports=["loopback"])
def test_rows_of_zeros(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 2])
    first, second, target = rows((4, 3))
    first[0], second[1] = 0, 0
    loss = nn.DistributedCosineEmbeddingLoss(P_x)
    check(P_x, torch.nn.CosineEmbeddingLoss(), loss, [first, second, target], learned=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@distributed(ranks=3, transports=["loopback"])
def test_16_bits(P_world: Partition, dtype: torch.dtype) -> None:
    P_x = grid(P_world, [1, 2])
    *inputs, target = rows((5, 6))
    wholes = [each.to(dtype) for each in inputs]
    blocks = [own_part(each, each.shape, P_x) for each in wholes]
    loss = nn.DistributedCosineEmbeddingLoss(P_x)
    value = loss(*blocks, own_part(target, (5, 6), P_x))
    expected = torch.nn.CosineEmbeddingLoss()(*[each.float() for each in wholes], target)
    torch.testing.assert_close(value, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@distributed(ranks=2, transports=["loopback"])
def test_partitions_that_are_refused(P_world: Partition) -> None:
    with pytest.raises(PartitionError, match=r"P_x has shape \[2, 1, 1\] but needs two axes"):
        nn.DistributedCosineEmbeddingLoss(grid(P_world, [2, 1, 1]))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ((torch.ones(2), torch.ones(2), torch.ones(2)), "first input's block has 1 dims, not 2"),
        ((torch.ones(2, 3), torch.ones(2, 1), torch.ones(2)), r"shape \[2, 1\], not \[2, 3\]"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), r"shape \[3\], not \[2\]"),
    ],
)
@distributed(ranks=2, transports=["loopback"])
def test_a_wrong_block_on_one_rank_is_refused_everywhere(
    P_world: Partition, wrong: tuple[torch.Tensor, ...], message: str
) -> None:
    loss = nn.DistributedCosineEmbeddingLoss(grid(P_world, [2, 1]))
    right = (torch.ones(2, 3), torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ShapeError, match=message):
        loss(*(wrong if P_world.rank == 1 else right))
        loss(*right)
