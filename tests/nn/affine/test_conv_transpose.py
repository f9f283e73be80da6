"""The distributed transposed convolution is the sequential one, however tensors are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import DistributedConvTranspose1d, DistributedConvTranspose2d
from gpudist.world.partition import Partition
from tests.nn.affine.conv_cases import placed
from tests.nn.affine.conv_transpose_cases import F64, check, owner
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.pool import distributed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("channels", [(4, 4, 4), (4, 8, 2), (8, 4, 4), (6, 3, 3)])
@distributed(ranks=5, transports=["loopback"])
def test_groups_in_diagonal_blocks(
    P_world: Partition, channels: tuple[int, int, int], bias: bool
) -> None:
    inputs, outputs, groups = channels
    parts = 3 if groups == 3 else 2
    for spatial in (1, 5 // parts):
        ranks = [4, 1, 0, 3, 2][: parts * spatial]
        P_x = grid(P_world, [1, parts, spatial], ranks)
        P_w = grid(P_world, [parts, 1, spatial], ranks)
        options = {"stride": 2, "groups": groups, "bias": bias, "shape": (2, inputs, 5)}
        check(P_x, inputs, outputs, 3, others=(P_x, P_w), diagonal=True, **options)
        check(P_x, inputs, outputs, 3, owned=owner(P_w, (parts, 1), True), **options)
        P_y = grid(P_world, [1, parts, spatial], ranks[::-1])
        check(P_x, inputs, outputs, 3, others=(P_y, P_w), diagonal=True, **options)


@distributed(ranks=9)
def test_groups_on_apart_workers(P_world: Partition) -> None:
    P_x, P_y = grid(P_world, [1, 2, 2, 1], [0, 1, 2, 3]), grid(P_world, [1, 2, 2, 1], [8, 7, 3, 2])
    P_w = grid(P_world, [2, 1, 2, 1], [4, 5, 6, 0])
    options = {"groups": 2, "diagonal": True, "shape": (2, 4, 3, 4)}
    check(P_x, 4, 6, 3, 2, 1, others=(P_y, P_w), **options)


@distributed(ranks=9)
def test_uneven_blocks_in_every_dim(P_world: Partition) -> None:
    cut = {0: [0, 3], 2: [1, 4], 3: [5, 2]}
    P_x = grid(P_world, [2, 1, 2, 2], [8, 7, 6, 5, 4, 3, 2, 1])
    check(P_x, 2, 3, 3, 2, shape=(3, 2, 5, 7), sizes=cut, output_sizes={0: [0, 3]})
    P_x, P_y, P_w = placed(P_world, "all")
    check(P_x, 5, 4, 3, 2, others=(P_y, P_w), shape=(2, 5, 6, 7), sizes={2: [5, 1]})


@distributed(ranks=4, transports=["loopback"])
def test_a_batch_without_samples(P_world: Partition) -> None:
    check(grid(P_world, [1, 1, 4]), 2, 3, 3, 2, shape=(0, 2, 5))
    check(grid(P_world, [4, 1, 1]), 2, 3, 3, 2, shape=(3, 2, 5))


@pytest.mark.parametrize("extents", [(7, 10), (2, 4, 8, 11), (9, 12)])
@distributed(ranks=5)
def test_output_size(P_world: Partition, extents: tuple[int, ...]) -> None:
    """``output_size`` takes precedence over the layer's output padding."""
    P_x = grid(P_world, [1, 1, 2, 2], [4, 2, 1, 0])
    options = {"output_size": extents, "shape": (2, 3, 3, 4)}
    check(P_x, 3, 4, 3, 3, 1, 2, batches=[1], **options)
    P_y, P_w = grid(P_world, [1, 2, 1, 1], [4, 1]), grid(P_world, [2, 1, 1, 1], [3, 2])
    check(grid(P_world, [1, 1, 1, 1]), 3, 4, 3, 3, 1, others=(P_y, P_w), **options)


@distributed(ranks=3, transports=["loopback"])
def test_one_layer_gives_many_output_sizes(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 3])
    torch.manual_seed(1)
    sequential = torch.nn.ConvTranspose1d(2, 3, 1, 3, dtype=F64)
    torch.manual_seed(1)
    layer = DistributedConvTranspose1d(P_x, 2, 3, 1, 3, dtype=F64)
    whole = random_like_all((2, 2, 4), 1)
    for size in ([12], None, [10], [11], [2, 3, 12], None):
        y_whole, y = sequential(whole, size), layer(own_block(whole, P_x), size)
        assert_block_of(y.detach(), y_whole.detach(), own_slices(y_whole.shape, P_x), "output")


@distributed(ranks=4, transports=["loopback"])
def test_output_sizes_that_cannot_be_are_refused_on_every_rank(P_world: Partition) -> None:
    P_x, P_y = grid(P_world, [1, 1, 2]), grid(P_world, [1, 1, 2], [2, 3])
    layer = DistributedConvTranspose1d(P_x, P_y, P_x, 2, 3, 3, 2, 1, dtype=F64)
    block = own_block(random_like_all((2, 2, 5), 1), P_x)
    for size in (8, 11):
        with pytest.raises(ShapeError, match=f"dim 2: output_size {size} must be from 9 to 10"):
            layer(block, [size])
    with pytest.raises(ShapeError, match=r"output_size \[1, 9\] must have 1 or 3 entries"):
        layer(block, [1, 9])
    assert layer(block, [10]).shape == ((2, 3, 5) if P_y.active else (2, 0))


@pytest.mark.parametrize("agreement", [{"shape": "dynamic"}, {"global_shape": (2, 5, 4, 3)}])
@distributed(ranks=9, transports=["loopback"])
def test_other_agreements(P_world: Partition, agreement: dict[str, Any]) -> None:
    P_x, P_y, P_w = placed(P_world, "all")
    options = {"agreement": agreement, "shape": (2, 5, 4, 3)}
    check(P_x, 5, 4, 3, 2, others=(P_y, P_w), **options)
    check(grid(P_world, [2, 1, 2, 2]), 5, 4, 3, 2, output_size=(9, 8), **options)


@distributed(ranks=4, transports=["loopback"])
def test_partitions_that_do_not_fit_are_refused(P_world: Partition) -> None:
    P_1, P_channels = grid(P_world, [1, 1, 1]), grid(P_world, [1, 2, 1])
    P_w = grid(P_world, [2, 2, 1])
    with pytest.raises(PartitionError, match=r"ConvTranspose1d, dim 1: P_x .* give P_y and P_w"):
        DistributedConvTranspose1d(P_channels, 4, 4, 3)
    with pytest.raises(PartitionError, match=r"ConvTranspose1d: P_x .* needs 3 axes"):
        DistributedConvTranspose1d(grid(P_world, [1, 1, 2, 2]), 4, 4, 3)
    with pytest.raises(PartitionError, match=r"P_w has shape \[1, 1, 1\] but must be \[2, 2, 1\]"):
        DistributedConvTranspose1d(P_channels, P_channels, P_1, 4, 4, 3)
    with pytest.raises(PartitionError, match="block-diagonal"):
        DistributedConvTranspose1d(P_channels, P_channels, P_w, 4, 4, 3, groups=2)
    with pytest.raises(ShapeError, match="2 blocks but only 1 output channels"):
        DistributedConvTranspose1d(P_channels, P_channels, P_w, 4, 1, 3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"padding_mode": "circular"}, "padding_mode 'circular' is not supported; use 'zeros'"),
        (
            {"padding": "same"},
            "padding is 'same' .str.; it takes an integer or a",
        ),
        ({"kernel_size": (3, 3)}, "kernel_size has 2 entries, but the layer has 1 dims"),
        ({"in_channels": 3, "groups": 2}, "in_channels 3 must be divisible by groups 2"),
        ({"out_channels": 3, "groups": 2}, "out_channels 3 must be divisible by groups 2"),
        ({"groups": 0}, "groups 0 must be at least 1"),
        ({"stride": 0}, "dim 2: kernel 3, stride 0"),
        ({"padding": -1}, "dim 2: kernel 3, .* padding -1"),
        (
            {"stride": 2, "output_padding": 2},
            "dim 2: output_padding 2 must be smaller than stride 2 or dilation 1",
        ),
    ],
)
@distributed(ranks=2, transports=["loopback"])
def test_arguments_that_do_not_fit_are_refused(
    P_world: Partition, options: dict[str, Any], message: str
) -> None:
    given = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, **options}
    with pytest.raises(ShapeError, match=f"DistributedConvTranspose1d.*{message}"):
        DistributedConvTranspose1d(grid(P_world, [1, 1, 2]), **given)


@pytest.mark.parametrize("case", ["features", "features, moved", "both", "disjoint"])
@distributed(ranks=9, transports=["loopback"])
def test_inputs_that_do_not_fit_are_refused_on_every_rank(P_world: Partition, case: str) -> None:
    P_x, P_y, P_w = placed(P_world, case)
    P_all = P_x.create_partition_union(P_w).create_partition_union(P_y)
    whole = random_like_all((2, 4, 4, 4), 0)
    if not P_all.active:
        return
    with pytest.raises(ShapeError, match="dim 1: the input has 4 channels, not 5"):
        DistributedConvTranspose2d(P_x, P_y, P_w, 5, 4, 3, dtype=F64)(own_block(whole, P_x))
    with pytest.raises(ShapeError, match=r"dim 3: .* padding 3 has no output for 4 cells"):
        layer = DistributedConvTranspose2d(P_x, P_y, P_w, 4, 4, 3, padding=(0, 3), dtype=F64)
        layer(own_block(whole, P_x))
    if P_x.shape[1] == 2:
        with pytest.raises(ShapeError, match=r"\[3, 1\] channels"):
            layer = DistributedConvTranspose2d(P_x, P_y, P_w, 4, 4, 3, dtype=F64)
            layer(own_block(whole, P_x, {1: [3, 1]}))
