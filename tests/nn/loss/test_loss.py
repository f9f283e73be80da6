"""Properties shared by the losses: who calls them, and how exactly they count."""

from __future__ import annotations

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import grid, own_block, random_like_all
from tests.nn.loss.loss_cases import check
from tests.pool import distributed


@distributed(ranks=5, transports=["loopback"])
def test_some_workers_only(P_world: Partition) -> None:
    P_x, P_loss = grid(P_world, [1, 2], [3, 1]), P_world.create_partition_inclusive([1, 3, 4])
    if not P_loss.active:
        return
    x, target = random_like_all((4, 5), 1), random_like_all((4, 5), 2)
    loss = nn.DistributedMSELoss(P_x, P_loss=P_loss)
    check(P_x, torch.nn.MSELoss(), loss, [x, target], P_loss=P_loss)
    entropy = nn.DistributedCrossEntropyLoss(P_x, P_loss=P_loss)
    check(P_x, torch.nn.CrossEntropyLoss(), entropy, [x, torch.arange(4)], P_loss=P_loss)


@distributed(ranks=3, transports=["loopback"])
def test_arguments_that_are_refused(P_world: Partition) -> None:
    P_x, P_loss = grid(P_world, [2, 1]), P_world.create_partition_inclusive([1, 2])
    for layer in (nn.DistributedMSELoss, nn.DistributedNLLLoss, nn.DistributedKLDivLoss):
        with pytest.raises(PartitionError, match=r"world ranks \[0\] of P_x are not in P_loss"):
            layer(P_x, P_loss=P_loss)
        with pytest.raises(ShapeError, match=f"{layer.__name__}: reduction is 'average'; use 'm"):
            layer(P_x, reduction="average")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@distributed(ranks=3, transports=["loopback"])
def test_half_precision_counts_every_cell(P_world: Partition, dtype: torch.dtype) -> None:
    """There are more cells than the dtype can count; the mean is right all the same."""
    P_x = grid(P_world, [2, 1])
    whole = random_like_all((300, 300), 1).to(dtype)
    expected = torch.nn.MSELoss()(whole, torch.zeros_like(whole))
    block = own_block(whole, P_x)
    value = nn.DistributedMSELoss(P_x)(block, torch.zeros_like(block))
    assert value.dtype == dtype
    torch.testing.assert_close(value, expected)
    value.backward()
    assert block.grad is not None and block.grad.dtype == dtype
