"""The distributed convolution is the sequential one, however tensor and weight are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import DistributedConv1d, DistributedConv2d
from gpudist.planning.rehearsal import KeptForBackward
from gpudist.world.partition import Partition
from tests.nn.affine.conv_cases import F64, check, owner, placed
from tests.nn.compare import (
    grid,
    own_block,
    random_like_all,
)
from tests.pool import distributed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("channels", [(4, 4, 4), (4, 8, 2), (6, 3, 3), (8, 4, 4)])
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
        options = {"groups": groups, "bias": bias, "shape": (2, inputs, 7)}
        check(P_x, inputs, outputs, 3, others=(P_x, P_w), **options)
        check(P_x, inputs, outputs, 3, owned=owner(P_w, (parts, 1)), **options)
        P_y = grid(P_world, [1, parts, spatial], ranks[::-1])
        check(P_x, inputs, outputs, 3, others=(P_y, P_w), **options)


@distributed(ranks=9)
def test_groups_on_apart_workers(P_world: Partition) -> None:
    P_x, P_y = grid(P_world, [1, 2, 2, 1], [0, 1, 2, 3]), grid(P_world, [1, 2, 2, 1], [8, 7, 3, 2])
    P_w = grid(P_world, [2, 1, 2, 1], [4, 5, 6, 0])
    check(P_x, 4, 6, 3, padding=1, groups=2, others=(P_y, P_w), shape=(2, 4, 5, 4))


@distributed(ranks=9)
def test_uneven_blocks_in_every_dim(P_world: Partition) -> None:
    cut = {0: [0, 3], 2: [1, 6], 3: [5, 2]}
    P_x = grid(P_world, [2, 1, 2, 2], [8, 7, 6, 5, 4, 3, 2, 1])
    check(P_x, 2, 3, 3, padding=1, shape=(3, 2, 7, 7), sizes=cut, output_sizes={0: [0, 3]})
    P_x, P_y, P_w = placed(P_world, "all")
    check(P_x, 5, 4, 3, others=(P_y, P_w), shape=(2, 5, 6, 7), sizes={2: [5, 1]})


@pytest.mark.parametrize(("shape", "parts"), [((1, 1, 2, 1), 6 * 4), ((1, 1, 2, 2), 6 * 6)])
@distributed(ranks=4, transports=["loopback"])
def test_padding_beyond_both_edges_is_not_kept(
    P_world: Partition, shape: Sequence[int], parts: int
) -> None:
    """A dilated kernel much wider than the image reads mainly padding."""
    P_x = grid(P_world, shape)
    check(P_x, 3, 2, 3, 1, 12, 12, shape=(2, 3, 4, 4))
    if not P_x.active:
        return
    layer = DistributedConv2d(P_x, 3, 2, 3, padding=12, dilation=12, replicate_parameters=True)
    x = torch.rand(2, 3, 4 // shape[2], 4 // shape[3], requires_grad=True)
    kept = KeptForBackward(layer.parameters())
    with kept:
        layer(x)
    assert kept.nbytes == 2 * 3 * parts * 4


@pytest.mark.parametrize("window", [(1, 1, 0), (2, 2, 0), (1, 2, 0), (3, 3, 0)])
@distributed(ranks=4)
def test_a_block_without_ghosts_is_never_copied(P_world: Partition, window: Any) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    x = torch.randn(2, 2, 6, 6, requires_grad=True)
    y: Any = DistributedConv2d(P_x, 2, 3, *window)(x)
    assert y.grad_fn._saved_input.data_ptr() == x.data_ptr()
    check(P_x, 2, 3, *window, shape=(2, 2, 12, 12))
    y = DistributedConv2d(grid(P_world, [4, 1, 1, 1]), 2, 3, 3, padding=1)(x)
    assert y.grad_fn._saved_input.data_ptr() == x.data_ptr()


@distributed(ranks=4, transports=["loopback"])
def test_partitions_that_do_not_fit_are_refused(P_world: Partition) -> None:
    P_1, P_channels, P_column = (
        grid(P_world, shape) for shape in ([1, 1, 1], [1, 2, 1], [2, 1, 1])
    )
    P_features, P_w = grid(P_world, [1, 1, 2]), grid(P_world, [2, 2, 1])
    with pytest.raises(PartitionError, match="splits the channels; give P_y and P_w"):
        DistributedConv1d(P_channels, 4, 4, 3)
    with pytest.raises(PartitionError, match="splits the channels"):
        DistributedConv1d(grid(P_world, [2, 2, 1]), 4, 4, 3, groups=2)
    with pytest.raises(PartitionError, match="needs 3 axes"):
        DistributedConv1d(grid(P_world, [1, 1, 2, 2]), 4, 4, 3)
    with pytest.raises(PartitionError, match=r"P_w has shape \[2, 1, 1\] but must be \[2, 2, 1\]"):
        DistributedConv1d(P_channels, P_channels, P_column, 4, 4, 3)
    with pytest.raises(PartitionError, match=r"P_y has shape \[1, 1, 2\]"):
        DistributedConv1d(P_channels, P_features, P_w, 4, 4, 3)
    with pytest.raises(
        PartitionError, match=r"P_x has shape \[2, 1, 1\] but must be \[1, 'any', 1\]"
    ):
        DistributedConv1d(P_column, P_1, P_column, 4, 4, 3)
    with pytest.raises(PartitionError, match="P_y"):
        DistributedConv1d(P_1, grid(P_world, [1, 1]), P_1, 4, 4, 3)
    with pytest.raises(PartitionError, match="got 2 partitions"):
        DistributedConv1d(P_channels, P_channels, 4, 4, 3)  # pyright: ignore
    with pytest.raises(PartitionError, match="give both or neither"):
        DistributedConv1d(P_channels, 4, 4, 3, P_w=P_w)
    with pytest.raises(PartitionError, match="block-diagonal"):
        DistributedConv1d(P_channels, P_channels, P_w, 4, 4, 3, groups=2)
    with pytest.raises(PartitionError, match="block-diagonal"):
        DistributedConv1d(P_channels, P_1, grid(P_world, [1, 2, 1]), 4, 4, 3, groups=2)
    with pytest.raises(PartitionError, match="block-diagonal"):
        DistributedConv1d(P_channels, P_channels, P_column, 3, 3, 3, groups=3)
    with pytest.raises(ShapeError, match="2 blocks but only 1 input channels"):
        DistributedConv1d(P_channels, P_channels, P_w, 1, 4, 3)
    with pytest.raises(ShapeError, match="2 blocks but only 1 output channels"):
        DistributedConv1d(P_channels, P_channels, P_w, 4, 1, 3)


@distributed(ranks=2, transports=["loopback"])
def test_arguments_that_do_not_fit_are_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    with pytest.raises(
        ShapeError, match="padding_mode 'mirror' is not supported; use 'zeros', 'reflect'"
    ):
        DistributedConv1d(P_x, 4, 4, 3, padding=1, padding_mode="mirror")
    with pytest.raises(ShapeError, match="padding 'same' needs stride 1"):
        DistributedConv1d(P_x, 4, 4, 3, stride=2, padding="same")
    with pytest.raises(ShapeError, match="padding is 'full'"):
        DistributedConv1d(P_x, 4, 4, 3, padding="full")  # pyright: ignore
    with pytest.raises(ShapeError, match="kernel_size has 2 entries, but the layer has 1 dims"):
        DistributedConv1d(P_x, 4, 4, (3, 3))
    with pytest.raises(ShapeError, match="in_channels 3 must be divisible by groups 2"):
        DistributedConv1d(P_x, 3, 4, 3, groups=2)
    with pytest.raises(ShapeError, match="out_channels 3 must be divisible by groups 2"):
        DistributedConv1d(P_x, 4, 3, 3, groups=2)
    with pytest.raises(ShapeError, match="stride 0"):
        DistributedConv1d(P_x, 4, 4, 3, stride=0)


@pytest.mark.parametrize("case", ["features", "features, moved", "both", "disjoint"])
@distributed(ranks=9, transports=["loopback"])
def test_inputs_that_do_not_fit_are_refused_on_every_rank(P_world: Partition, case: str) -> None:
    P_x, P_y, P_w = placed(P_world, case)
    P_all = P_x.create_partition_union(P_w).create_partition_union(P_y)
    whole = random_like_all((2, 4, 4, 4), 0)
    if not P_all.active:
        return
    with pytest.raises(ShapeError, match="4 channels, not 5"):
        DistributedConv2d(P_x, P_y, P_w, 5, 4, 3, dtype=F64)(own_block(whole, P_x))
    with pytest.raises(ShapeError, match="needs 7 cells but the padded global extent is 6"):
        layer = DistributedConv2d(P_x, P_y, P_w, 4, 4, 7, padding=1, dtype=F64)
        layer(own_block(whole, P_x))
    if P_x.shape[1] == 2:
        with pytest.raises(ShapeError, match=r"\[3, 1\] channels"):
            layer = DistributedConv2d(P_x, P_y, P_w, 4, 4, 3, dtype=F64)
            layer(own_block(whole, P_x, {1: [3, 1]}))


@distributed(ranks=3, transports=["loopback"])
def test_batch_dims_missing_is_refused_on_every_rank(P_world: Partition) -> None:
    layer = DistributedConv2d(grid(P_world, [1, 1, 3, 1]), 4, 4, 3)
    with pytest.raises(ShapeError, match="has 3 dims, not 4"):
        layer(torch.randn(4, 5, 5))
