"""Distributed batch normalization is the sequential one, running statistics included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    assert_block_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.norm.norm_cases import (
    F64,
    GRIDS,
    Made,
    assert_groups,
    assert_same_buffers,
    check,
    check_penalty,
    make_both,
    owner,
)
from tests.pool import distributed
from tests.torchs_layers import torchs_layer

SHAPE = (5, 7, 6, 4)
CASES = {**GRIDS, "all": ([2, 2, 2, 1], [7, 6, 5, 4, 3, 2, 1, 0])}


def both(P_x: CartesianPartition, channels: int = 7, **options: Any) -> Made:
    dims = {2: 1, 3: 1, 4: 2, 5: 3}[P_x.dim]
    sequential, layer = f"BatchNorm{dims}d", f"DistributedBatchNorm{dims}d"
    return make_both(
        lambda: torchs_layer(sequential, num_features=channels, dtype=F64, **options),
        lambda: getattr(nn, layer)(P_x, channels, dtype=F64, **options),
        owner(P_x, [1]),
    )


@distributed(ranks=9, transports=["loopback"])
def test_averages_of_all_batches(P_world: Partition) -> None:
    """Rank 8 has no part. Several batches in training, then one in evaluation."""
    P_x = grid(P_world, *GRIDS["features"])
    made, owned = both(P_x, momentum=None), owner(P_x, [1])
    check(made, P_x, SHAPE, owned, batches=[2, 3])
    for module in made:
        module.eval()
    check(made, P_x, SHAPE, owned)


@distributed(ranks=4, transports=["loopback"])
def test_any_number_of_dims(P_world: Partition) -> None:
    """More dims than any torch layer supports, against torch's three-dimensional one."""
    P_x, shape = grid(P_world, [1, 1, 1, 2, 1, 2]), (2, 3, 2, 3, 2, 4)
    x = random_like_all(shape, 1)
    layer = nn.DistributedBatchNorm(P_x, 3, dtype=F64)
    y_whole = torch.nn.BatchNorm3d(3, dtype=F64)(x.flatten(-2)).view(shape)
    assert_block_of(layer(own_block(x, P_x)), y_whole, own_slices(shape, P_x), "output")


@pytest.mark.parametrize("of", ["input", "parameters"])
@pytest.mark.parametrize("case", ["one", "batch", "channels", "features", "all"])
@distributed(ranks=9, transports=["loopback"])
def test_double_backward(P_world: Partition, case: str, of: str) -> None:
    P_x = grid(P_world, *CASES[case])
    shape = (2, *SHAPE[1:]) if case == "batch" else SHAPE
    check_penalty(both(P_x), P_x, shape, owner(P_x, [1]), of)


@distributed(ranks=9, transports=["loopback"])
def test_channels_last_is_kept(P_world: Partition) -> None:
    P_x, last = grid(P_world, *GRIDS["mixed"]), torch.channels_last
    (sequential, layer), whole = both(P_x), random_like_all(SHAPE, 1)
    block = own_block(whole, P_x, requires_grad=False)
    y = layer(block.to(memory_format=last) if P_x.active else block)
    assert_block_of(y, sequential(whole), own_slices(SHAPE, P_x), "output")
    assert not P_x.active or y.is_contiguous(memory_format=last)


@distributed(ranks=4)
def test_messages(P_world: Partition) -> None:
    """One group forward and one backward; in evaluation parameters alone, or nothing."""
    P_x = grid(P_world, [2, 1, 1, 2])
    for affine in (True, False):
        layer = nn.DistributedBatchNorm2d(P_x, 4, affine=affine, global_shape=(6, 4, 5, 12))
        assert_groups(P_world, layer, (3, 4, 5, 6), 1)
        assert_groups(P_world, layer.eval(), (3, 4, 5, 6), int(affine))
    layer = nn.DistributedBatchNorm1d(grid(P_world, [1, 4]), 8, global_shape=(3, 8))
    assert_groups(P_world, layer, (3, 2), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@distributed(ranks=4, transports=["loopback"])
def test_large_mean(P_world: Partition, dtype: torch.dtype) -> None:
    """A mean of 1e4 (of 1e2 in 16 bits) standard deviations; squares in float32 would be lost."""
    P_x, shape = grid(P_world, [2, 1, 2]), (8, 3, 500)
    mean = 1e4 if dtype == torch.float32 else 1e2
    whole = (random_like_all(shape, 1) + mean).to(dtype)
    reference = torch.nn.BatchNorm1d(3, dtype=F64)
    x_reference = whole.double().requires_grad_()
    y_reference = reference(x_reference)
    layer = nn.DistributedBatchNorm1d(P_x, 3)
    x = own_block(whole, P_x)
    y = layer(x)
    assert y.dtype == dtype
    where = own_slices(shape, P_x)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    assert_block_of(y.double(), y_reference, where, "output", tolerance)
    weights = random_like_all(shape, 2)
    y_reference.backward(weights)
    y.backward(weights[where].to(dtype))
    assert x.grad is not None and x_reference.grad is not None and where is not None
    assert_block_of(x.grad.double(), x_reference.grad, where, "input gradient", 2 * tolerance)
    for name in ("running_mean", "running_var"):
        expected = reference.get_buffer(name)
        torch.testing.assert_close(
            layer.get_buffer(name).double(), expected, rtol=1e-6, atol=1e-6, msg=name
        )


@distributed(ranks=4, transports=["loopback"])
def test_equal_values_have_no_variance(P_world: Partition) -> None:
    """Far off zero the variance is a difference of large numbers, and never less than zero."""
    P_x = grid(P_world, [2, 1, 2])
    layer = nn.DistributedBatchNorm1d(P_x, 2, track_running_stats=False)
    y = layer(torch.full((3, 2, 5), 123456.7))
    assert torch.equal(y, torch.zeros_like(y))


@distributed(ranks=4, transports=["loopback"])
def test_no_values(P_world: Partition) -> None:
    """An empty batch leaves the running statistics as they were."""
    P_x = grid(P_world, [1, 1, 4])
    made = both(P_x, 3)
    sequential, layer = made
    whole, block = torch.zeros(0, 3, 8, dtype=F64), torch.zeros(0, 3, 2, dtype=F64)
    assert layer(block.requires_grad_()).shape == block.shape
    sequential(whole)
    assert_same_buffers(sequential, layer, P_x)


@distributed(ranks=3, transports=["loopback"])
def test_running_statistics_are_reset(P_world: Partition) -> None:
    layer = nn.DistributedBatchNorm1d(grid(P_world, [1, 2, 1], [2, 0]), 3, dtype=F64)
    layer(own_block(random_like_all((2, 3, 4), 1), layer.P_x))
    assert layer.num_batches_tracked is not None and layer.num_batches_tracked.item() == 1
    layer.reset_running_stats()
    assert layer.num_batches_tracked.item() == 0
    assert layer.running_var is not None and (layer.running_var == 1).all()


@distributed(ranks=4, transports=["loopback"])
def test_refused(P_world: Partition) -> None:
    P_4, P_c = grid(P_world, [2, 1, 2, 1]), grid(P_world, [1, 2, 1], [0, 3])
    with pytest.raises(PartitionError, match=r"BatchNorm1d: P_x has .* needs 2 or 3 axes"):
        nn.DistributedBatchNorm1d(P_4, 3)
    with pytest.raises(PartitionError, match="needs an axis for the batch"):
        nn.DistributedBatchNorm(grid(P_world, [4]), 3)
    layer = nn.DistributedBatchNorm2d(P_4, 3)
    with pytest.raises(ShapeError, match="has 4 channels, not 3"):
        layer(torch.randn(1, 4, 2, 2))
    layer = nn.DistributedBatchNorm2d(P_4, 3)
    with pytest.raises(ShapeError, match="int64; convert it to floating"):
        layer(torch.zeros(1, 3, 2, 2, dtype=torch.int64))
    layer = nn.DistributedBatchNorm1d(P_c, 4)
    if P_c.active:
        with pytest.raises(ShapeError, match=r"\[3, 1\] channels.* repartition"):
            layer(torch.randn(2, 3 if P_c.rank == 0 else 1, 5))


@distributed(ranks=4, transports=["loopback"])
def test_one_value_per_channel_is_refused_in_training(P_world: Partition) -> None:
    P_x = grid(P_world, [4, 1, 1])
    layer = nn.DistributedBatchNorm1d(P_x, 3)
    x = torch.randn(1 if P_x.rank == 2 else 0, 3, 1)
    with pytest.raises(ShapeError, match="expected more than 1 value per channel"):
        layer(x)
    assert layer.eval()(x).shape == x.shape
