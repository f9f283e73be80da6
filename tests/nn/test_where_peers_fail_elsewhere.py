"""Pools, linear layers, losses and movements that others compute wrongly, refuse or gather.

Versions: DTensor of torch 2.13; ShardTensor of PhysicsNeMo 2.3; DistDL's last commit, of January
2022, and Microsoft's fork of it, of February 2025.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpudist
from gpudist import nn
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.nn.compare import (
    assert_block_of,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.peer_cases import F64, moves_less_than_a_block, same, same_loss
from tests.pool import distributed

LOOPBACK = ["loopback"]
ROWS = [1, 1, 2, 1]


@distributed(ranks=2)
def test_blocks_of_3_and_5_cells_are_put_together(P_world: Partition) -> None:
    """DTensor 2.13: ``full_tensor`` of shards that do not follow ``torch.chunk`` ends the process,
    inside gloo (pytorch#144109)."""
    P_x = grid(P_world, [2, 1])
    whole = random_like_all((8, 3), 1)
    gathered = gpudist.gather(own_block(whole, P_x, {0: [3, 5]}), P_x)
    assert_block_of(gathered.detach(), whole, (slice(0, 8),) if P_world.rank == 0 else None, "all")


@pytest.mark.parametrize("layer", ["MaxPool2d", "AvgPool2d"])
@distributed(ranks=4, transports=LOOPBACK)
def test_a_pool_does_not_gather(P_world: Partition, layer: str) -> None:
    """DTensor 2.13: a pool over split rows gathers the whole tensor on every rank, and the backward
    of the average raises (PR 182526)."""
    moves_less_than_a_block(P_world, layer, 3, 2, 1)


@pytest.mark.parametrize("layer", ["MaxPool2d", "AvgPool2d"])
@distributed(ranks=2)
def test_pools_over_split_rows(P_world: Partition, layer: str) -> None:
    """DTensor 2.13: the backward of the average raises; ShardTensor needs stride = kernel, so that
    the 3x3 pool with stride 2 of a ResNet raises."""
    same(P_world, layer, (2, 3, 8, 8), ROWS, 3, 2, 1)


@distributed(ranks=2)
def test_max_pool_2_padding_1(P_world: Partition) -> None:
    """ShardTensor: wrong numbers. DistDL's users asked how padding is to be cut (#112)."""
    same(P_world, "MaxPool2d", (1, 3, 16, 8), ROWS, 2, 2, 1)


@distributed(ranks=3, transports=LOOPBACK)
def test_pools_whose_windows_do_not_divide_the_shards(P_world: Partition) -> None:
    """ShardTensor: raises."""
    for layer in ("MaxPool2d", "AvgPool2d"):
        same(P_world, layer, (1, 3, 16, 8), [1, 1, 3, 1], 3)
        same(P_world, layer, (1, 3, 16, 8), [1, 1, 3, 1], 3, sizes={2: [4, 4, 8]})


@pytest.mark.parametrize("head", ["batch", "features"])
@distributed(ranks=2)
def test_flatten_behind_a_convolution(P_world: Partition, head: str) -> None:
    """ShardTensor: the backward of flatten raises under torch 2.13. Here a repartition gives whole
    samples, or whole channels, that are flattened in place."""
    P_x, P_flat = grid(P_world, ROWS), grid(P_world, [2, 1, 1, 1])
    if head == "features":
        P_flat = grid(P_world, [1, 2, 1, 1])
    whole = random_like_all((4, 2, 5, 4), 1).requires_grad_()
    block = own_block(whole, P_x)
    scale = random_like_all((4, 40), 2)
    y = torch.flatten(nn.Repartition(P_x, P_flat)(block), 1)
    where = own_slices((4, 40), grid(P_world, P_flat.shape[:2]))
    assert_block_of(y.detach(), whole.detach().flatten(1), where, "flattened")
    (whole.flatten(1) * scale).square().sum().backward()
    assert where is not None
    (y * scale[where]).square().sum().backward()
    assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "gradient")


@pytest.mark.parametrize("layer", ["MaxPool2d", "AvgPool2d"])
@distributed(ranks=2, transports=LOOPBACK)
def test_the_stride_of_a_pool_is_its_kernel(P_world: Partition, layer: str) -> None:
    """DistDL: it is 1 (#203)."""
    same(P_world, layer, (2, 3, 9, 8), ROWS, 3)


@pytest.mark.parametrize("options", [{"count_include_pad": False}, {"divisor_override": 5}])
@distributed(ranks=2, transports=LOOPBACK)
def test_what_counts_in_an_average(P_world: Partition, options: dict[str, Any]) -> None:
    """DistDL: neither argument exists, and padding always counts."""
    same(P_world, "AvgPool2d", (2, 3, 9, 8), ROWS, 3, 2, 1, **options)


@distributed(ranks=2)
def test_relu_in_place_between_convolution_and_pool(P_world: Partition) -> None:
    """DistDL: raises (#199), since the exchange of the pool marks its input as changed."""
    P_x = grid(P_world, ROWS)
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(3, 2, 1),
    )
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        nn.DistributedConv2d(P_x, 2, 3, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        nn.DistributedMaxPool2d(P_x, 3, 2, 1),
    )
    whole = random_like_all((2, 2, 8, 6), 1).requires_grad_()
    block = own_block(whole, P_x)
    expected, y = sequential(whole), layers(block)
    assert_block_of(y.detach(), expected.detach(), own_slices(expected.shape, P_x), "output")
    expected.square().sum().backward()
    y.square().sum().backward()
    assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "gradient")


@distributed(ranks=2)
def test_the_gradient_of_a_sum_behind_a_halo(P_world: Partition) -> None:
    """DistDL: ``sum`` gives a gradient whose cells share memory; the adjoint adds to it in place,
    [1, 1, 1, 1] where [1, 1, 1, 2] is right, and changes the caller's tensor."""
    P_x = grid(P_world, [1, 1, 2])
    x = own_block(random_like_all((1, 1, 8), 1), P_x)
    y = gpudist.halo_exchange(x, P_x, halo=((1, 1),))
    one = torch.ones((), dtype=F64)
    y.backward(one.expand(y.shape))
    expected = [1, 1, 1, 2] if P_world.rank == 0 else [2, 1, 1, 1]
    assert x.grad is not None and x.grad.flatten().tolist() == expected
    assert one.item() == 1


@distributed(ranks=3)
def test_the_gradient_of_a_sum_behind_an_all_sum_reduce(P_world: Partition) -> None:
    """DistDL: a BufferError; its fork on GPUs: "NCCL requires arrays to be contiguous"."""
    P_x = grid(P_world, [3])
    x = torch.ones(4, dtype=F64, requires_grad=True)
    gpudist.all_sum_reduce(x, P_x, axes_reduce=[0]).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 4
    assert_adjoint(lambda x: gpudist.all_sum_reduce(x, P_x, axes_reduce=[0]), x, P_x)


@distributed(ranks=3, transports=LOOPBACK)
def test_linear_of_a_tensor_with_more_dims(P_world: Partition) -> None:
    """DistDL: two dims only."""
    same(P_world, "Linear", (4, 5, 6), [3, 1, 1], 6, 4, dtype=F64, parameter_dims=())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["MSELoss", "L1Loss"])
@distributed(ranks=3)
def test_a_loss_has_its_value_on_every_rank(P_world: Partition, loss: str, reduction: str) -> None:
    """DistDL: the value is on rank 0 alone, and zero elsewhere; an inactive rank raises."""
    input, target = random_like_all((4, 3, 5), 1), random_like_all((4, 3, 5), 2)
    same_loss(P_world, loss, [2, 1, 1], input, target, reduction=reduction)


@pytest.mark.parametrize("grid_shape", [[2, 1], [1, 3], [1, 1]])
@distributed(ranks=4, transports=LOOPBACK)
def test_cross_entropy(P_world: Partition, grid_shape: list[int]) -> None:
    """DistDL: has none."""
    target = torch.arange(6) % 5
    same_loss(P_world, "CrossEntropyLoss", grid_shape, random_like_all((6, 5), 1), target)
