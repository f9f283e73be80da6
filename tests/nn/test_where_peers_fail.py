"""Convolutions that other libraries compute wrongly, or refuse.

Versions: DTensor of torch 2.13; ShardTensor of PhysicsNeMo 2.3; DistDL's last commit, of January
2022, and Microsoft's fork of it, of February 2025.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError
from gpudist.world.partition import Partition
from tests.nn.affine import conv_cases
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.peer_cases import F64, same
from tests.pool import distributed

LOOPBACK = ["loopback"]
ROWS, COLUMNS = [1, 1, 2, 1], [1, 1, 1, 2]


@pytest.mark.parametrize("grid_shape", [ROWS, COLUMNS], ids=["rows", "columns"])
@distributed(ranks=2)
def test_conv_3_padding_1(P_world: Partition, grid_shape: list[int]) -> None:
    """DTensor 2.13: the output is declared as if the batch were split, and cannot be gathered;
    before, rows gave wrong numbers, and columns no input gradient."""
    same(P_world, "Conv2d", (2, 3, 8, 8), grid_shape, 3, 4, 3, padding=1, dtype=F64)


@distributed(ranks=2)
def test_two_convolutions_in_a_row_have_gradients(P_world: Partition) -> None:
    """DTensor before 2.13: the exchange of ghosts returns nothing, so that the layers in front of a
    convolution get no gradient at all."""
    P_x = grid(P_world, COLUMNS)
    torch.manual_seed(1)
    sequential = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64), torch.nn.Conv2d(3, 2, 3, dtype=F64)
    )
    torch.manual_seed(1)
    layers = torch.nn.Sequential(
        nn.DistributedConv2d(P_x, 2, 3, 3, padding=1, dtype=F64),
        nn.DistributedConv2d(P_x, 3, 2, 3, dtype=F64),
    )
    whole = random_like_all((2, 2, 7, 8), 1).requires_grad_()
    block = own_block(whole, P_x)
    sequential(whole).square().sum().backward()
    layers(block).square().sum().backward()
    assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "input gradient")
    for mine, theirs in zip(layers.parameters(), sequential.parameters(), strict=True):
        if P_world.rank == 0:
            assert_equal_to(mine.grad, gradient_of(theirs), 1e-10, "parameter gradient")


@distributed(ranks=2)
def test_conv_3_without_padding(P_world: Partition) -> None:
    """DTensor 2.13: an error, and before, an error once the output is gathered."""
    same(P_world, "Conv2d", (2, 3, 8, 8), COLUMNS, 3, 4, 3, dtype=F64)


@distributed(ranks=2)
def test_conv_2_stride_2(P_world: Partition) -> None:
    """DTensor 2.13: an error, though no rank needs a cell of another."""
    same(P_world, "Conv2d", (2, 3, 8, 8), COLUMNS, 3, 4, 2, stride=2, dtype=F64)


@pytest.mark.parametrize("options", [{"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}])
@distributed(ranks=2)
def test_conv_3_with_stride_or_dilation(P_world: Partition, options: dict[str, Any]) -> None:
    """DTensor 2.13: an error; padding needs stride 1, and dilation must be 1."""
    same(P_world, "Conv2d", (2, 3, 8, 8), COLUMNS, 3, 4, 3, **options, dtype=F64)


@distributed(ranks=2)
def test_conv1d(P_world: Partition) -> None:
    """DTensor 2.13: an error, and before, an IndexError in backward."""
    same(P_world, "Conv1d", (2, 3, 8), [1, 1, 2], 3, 4, 3, padding=1, dtype=F64)


@distributed(ranks=2)
def test_conv3d(P_world: Partition) -> None:
    """DTensor 2.13: an error, and before, no input gradient."""
    same(P_world, "Conv3d", (2, 2, 4, 5, 6), [1, 1, 1, 1, 2], 2, 3, 3, padding=1, dtype=F64)


@distributed(ranks=4)
def test_conv_on_some_of_the_ranks(P_world: Partition) -> None:
    """DTensor 2.13: neighbours are counted in the whole world, so that a submesh talks to ranks
    outside it."""
    same(P_world, "Conv2d", (2, 3, 8, 8), COLUMNS, 3, 4, 3, padding=1, dtype=F64, ranks=[2, 3])


@distributed(ranks=4)
def test_conv_on_a_grid(P_world: Partition) -> None:
    """DTensor 2.13: only the last dim is exchanged, with neighbours of a mesh of one dim."""
    same(P_world, "Conv2d", (2, 3, 8, 8), [1, 1, 2, 2], 3, 4, 3, padding=1, dtype=F64)


@distributed(ranks=4)
def test_conv_where_the_last_rank_has_no_cell(P_world: Partition) -> None:
    """DTensor 2.13: 6 cells on 4 ranks are 2, 2, 2 and 0 by ``torch.chunk``; its convolution needs
    shards of one size."""
    sizes = {2: [2, 2, 2, 0]}
    same(P_world, "Conv2d", (2, 3, 6, 5), [1, 1, 4, 1], 3, 4, 3, padding=1, dtype=F64, sizes=sizes)


@distributed(ranks=2, transports=LOOPBACK)
def test_double_backward_of_a_convolution(P_world: Partition) -> None:
    """DTensor 2.13: the gradient of a gradient fails (pytorch#159959). DistDL has none."""
    P_x = grid(P_world, COLUMNS)
    torch.manual_seed(1)
    sequential = torch.nn.Conv2d(2, 2, 3, padding=1, dtype=F64)
    torch.manual_seed(1)
    layer = nn.DistributedConv2d(P_x, 2, 2, 3, padding=1, dtype=F64)
    whole = random_like_all((1, 2, 5, 6), 1).requires_grad_()
    block = own_block(whole, P_x)
    for model, x in ((sequential, whole), (layer, block)):
        (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert_block_of(block.grad, gradient_of(whole), own_slices(whole.shape, P_x), "penalty")


@distributed(ranks=2)
def test_conv_3_stride_2_without_padding(P_world: Partition) -> None:
    """ShardTensor: 8 rows of output where 7 are right."""
    same(P_world, "Conv2d", (1, 3, 16, 8), ROWS, 3, 4, 3, stride=2, dtype=F64)


@distributed(ranks=2)
def test_conv_3_stride_2_padding_1_on_odd_shards(P_world: Partition) -> None:
    """ShardTensor: wrong numbers."""
    same(P_world, "Conv2d", (1, 3, 18, 8), ROWS, 3, 4, 3, stride=2, padding=1, dtype=F64)
    sizes = {2: [9, 8]}
    same(
        P_world, "Conv2d", (1, 3, 17, 8), ROWS, 3, 4, 3, stride=2, padding=1, dtype=F64, sizes=sizes
    )


@distributed(ranks=2)
def test_conv_3_stride_3(P_world: Partition) -> None:
    """ShardTensor: values and gradients are wrong."""
    same(P_world, "Conv2d", (1, 3, 16, 8), ROWS, 3, 4, 3, stride=3, dtype=F64)


@pytest.mark.parametrize("kernel", [1, 2])
@distributed(ranks=2)
def test_conv_1_and_2_stride_2_on_odd_shards(P_world: Partition, kernel: int) -> None:
    """ShardTensor: wrong numbers; a rank must begin at an even row of the whole tensor."""
    same(P_world, "Conv2d", (1, 3, 18, 8), ROWS, 3, 4, kernel, stride=2, dtype=F64)
    sizes = {2: [7, 11]}
    same(P_world, "Conv2d", (1, 3, 18, 8), ROWS, 3, 4, kernel, stride=2, dtype=F64, sizes=sizes)


@pytest.mark.parametrize("kernel, stride", [(2, 1), (4, 1), (4, 2), (6, 4)])
@distributed(ranks=2, transports=LOOPBACK)
def test_even_kernels(P_world: Partition, kernel: int, stride: int) -> None:
    """ShardTensor: raises unless stride = kernel. DistDL: wrong halos before #180."""
    same(P_world, "Conv2d", (1, 3, 16, 8), ROWS, 3, 4, kernel, stride=stride, dtype=F64)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@distributed(ranks=2, transports=LOOPBACK)
def test_padding_on_one_side(P_world: Partition) -> None:
    """ShardTensor: uneven padding was wrong (PR 1535); 'same' with an even kernel pads more
    behind."""
    same(P_world, "Conv2d", (1, 3, 9, 8), ROWS, 3, 4, (4, 3), padding="same", dtype=F64)


@distributed(ranks=4, transports=LOOPBACK)
def test_circular_padding(P_world: Partition) -> None:
    """ShardTensor: raises; DistDL: raises, or pads each block by its own edge."""
    options: dict[str, Any] = {"padding": (1, 2), "padding_mode": "circular", "dtype": F64}
    same(P_world, "Conv2d", (1, 3, 7, 6), [1, 1, 2, 2], 3, 4, (3, 5), **options)


@distributed(ranks=4)
def test_a_halo_wider_than_the_neighbours_block(P_world: Partition) -> None:
    """ShardTensor: an IndexError. DistDL: wrong numbers, up to 0.5 in the output and 5 in the
    gradient of the weight, since it asks the next rank alone."""
    same(P_world, "Conv2d", (1, 2, 5, 4), [1, 1, 4, 1], 2, 3, (5, 1), padding=(2, 0), dtype=F64)
    same(P_world, "Conv2d", (1, 2, 8, 4), [1, 1, 4, 1], 2, 3, (7, 1), padding=(3, 0), dtype=F64)


@distributed(ranks=4)
def test_split_channels(P_world: Partition) -> None:
    """ShardTensor: torch's own error about the local channels. DTensor 2.13: none at all."""
    P_x, P_w = grid(P_world, [1, 2, 1, 1]), grid(P_world, [2, 2, 1, 1])
    conv_cases.check(P_x, 4, 4, 3, padding=1, others=(P_x, P_w), shape=(2, 4, 6, 5))


@distributed(ranks=4, transports=LOOPBACK)
def test_four_ranks_along_one_dim(P_world: Partition) -> None:
    """ShardTensor: two mesh dims on one dim of the tensor raise; here that is one axis of 4."""
    same(P_world, "Conv2d", (2, 3, 10, 5), [1, 1, 4, 1], 3, 4, 3, padding=1, dtype=F64)


@distributed(ranks=4, transports=LOOPBACK)
def test_more_than_one_sample(P_world: Partition) -> None:
    """ShardTensor: the batch of a domain group must be 1. DistDL: with split channels, a split
    batch is lost."""
    same(P_world, "Conv2d", (5, 3, 8, 4), [2, 1, 2, 1], 3, 4, 3, padding=1, dtype=F64)
    same(P_world, "MaxPool2d", (5, 3, 8, 4), [2, 1, 2, 1], 2)


@distributed(ranks=2, transports=LOOPBACK)
def test_a_domain_of_one_rank(P_world: Partition) -> None:
    """ShardTensor: crashes at domain size 1 (PR 1400)."""
    same(P_world, "Conv2d", (2, 3, 6, 6), [1, 1, 1, 1], 3, 4, 3, padding=1, dtype=F64)
    same(P_world, "MaxPool2d", (2, 3, 6, 6), [1, 1, 1, 1], 3, 2, 1)


@pytest.mark.parametrize("window", [(1, 0), (3, 1)])
@distributed(ranks=2, transports=LOOPBACK)
def test_blocks_of_6_and_2_cells(P_world: Partition, window: tuple[int, int]) -> None:
    """DistDL: 10 and 9 outputs where 8 are right, since a halo that is negative on the right is not
    cut."""
    kernel, padding = window
    same(
        P_world, "Conv1d", (2, 3, 8), [1, 1, 2], 3, 4, kernel, padding=padding, dtype=F64,
        sizes={2: [6, 2]},
    )  # fmt: skip


@distributed(ranks=2, transports=LOOPBACK)
def test_conv_1_of_a_leaf(P_world: Partition) -> None:
    """DistDL: without padding or halo, the exchange works in place on a leaf, which raises, on some
    ranks alone."""
    same(P_world, "Conv2d", (2, 3, 5, 4), ROWS, 3, 4, 1, dtype=F64)


@distributed(ranks=2)
def test_conv_with_stride_ends(P_world: Partition) -> None:
    """DistDL: hung (#172)."""
    same(P_world, "Conv2d", (2, 3, 9, 8), ROWS, 3, 4, 3, stride=3, padding=1, dtype=F64)


@distributed(ranks=2, transports=LOOPBACK)
def test_channels_split_on_the_input_alone_are_refused(P_world: Partition) -> None:
    """DistDL: a feature convolution takes such an input and computes something else."""
    with pytest.raises(PartitionError, match="splits the channels; give P_y and P_w"):
        nn.DistributedConv2d(grid(P_world, [1, 2, 1, 1]), 4, 4, 3)


@distributed(ranks=4, transports=LOOPBACK)
def test_groups_across_blocks_are_refused(P_world: Partition) -> None:
    """DistDL: passes ``groups`` on to each block unchecked."""
    P_x, P_w = grid(P_world, [1, 2, 1, 1]), grid(P_world, [2, 2, 1, 1])
    with pytest.raises(PartitionError, match="block-diagonal"):
        nn.DistributedConv2d(P_x, P_x, P_w, 4, 4, 3, groups=2)


@distributed(ranks=4, transports=LOOPBACK)
def test_initial_weights_of_split_channels(P_world: Partition) -> None:
    """DistDL: each block draws by its own fan-in, from another distribution than torch's layer."""
    P_x, P_w = grid(P_world, [1, 2, 1]), grid(P_world, [2, 2, 1])
    torch.manual_seed(3)
    expected = torch.nn.Conv1d(6, 4, 3).weight.detach()
    torch.manual_seed(3)
    layer = nn.DistributedConv1d(P_x, P_x, P_w, 6, 4, 3)
    assert P_w.index is not None and isinstance(layer.weight, torch.Tensor)
    i, j, _ = P_w.index
    block = expected[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]
    assert torch.equal(layer.weight.detach(), block)


@distributed(ranks=4, transports=LOOPBACK)
def test_inactive_ranks_keep_the_dtype(P_world: Partition) -> None:
    """DistDL: a tensor without cells always has the default dtype, float32 beside float64."""
    layer = nn.DistributedConv2d(grid(P_world, ROWS), 2, 3, 3, dtype=F64)
    y = layer(own_block(random_like_all((1, 2, 6, 6), 1), grid(P_world, ROWS)))
    assert y.dtype == F64


@distributed(ranks=2, transports=LOOPBACK)
def test_bfloat16(P_world: Partition) -> None:
    """DistDL: a KeyError."""
    P_x = grid(P_world, ROWS)
    torch.manual_seed(1)
    sequential = torch.nn.Conv2d(2, 3, 3, padding=1, dtype=torch.bfloat16)
    torch.manual_seed(1)
    layer = nn.DistributedConv2d(P_x, 2, 3, 3, padding=1, dtype=torch.bfloat16)
    whole = random_like_all((1, 2, 6, 5), 1).bfloat16()
    expected = sequential(whole).detach()
    y = layer(own_block(whole, P_x)).detach()
    assert_block_of(y, expected, own_slices(expected.shape, P_x), "output", 1e-2)
