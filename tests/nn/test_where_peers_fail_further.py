"""Transposed convolutions, padding, pools, normalization, upsampling and losses where peers fail.

Versions: DTensor of torch 2.13; ShardTensor of PhysicsNeMo 2.3; DistDL's last commit, of January
2022, and Microsoft's fork of it, of February 2025.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.nn.peer_cases import F64, moves_less_than_a_block, same, same_loss
from tests.pool import distributed

LOOPBACK = ["loopback"]
ROWS, QUARTERS = [1, 1, 2, 1], [1, 1, 2, 2]
SHAPE = (2, 4, 9, 8)
GATHERED: dict[str, tuple[Any, ...]] = {
    "BatchNorm2d": (4,),
    "GroupNorm": (2, 4),
    "InstanceNorm2d": (4,),
    "Upsample": (None, 2, "bilinear"),
    "ZeroPad2d": (1,),
    "CircularPad2d": (1,),
    "AdaptiveAvgPool2d": (1,),
}


@pytest.mark.parametrize("layer", GATHERED)
@distributed(ranks=4, transports=LOOPBACK)
def test_what_others_gather_moves_little(P_world: Partition, layer: str) -> None:
    """DTensor 2.13: gathers the whole tensor on every rank, without a word. ShardTensor: so does
    its fallback, for batch and instance norm and zero padding."""
    moves_less_than_a_block(P_world, layer, *GATHERED[layer])


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@distributed(ranks=4, transports=LOOPBACK)
def test_conv_with_padding_from_the_tensor(P_world: Partition, mode: str) -> None:
    """DistDL: raises for a split tensor, or pads each block by its own edge. ShardTensor: raises
    for circular padding."""
    options: dict[str, Any] = {"padding": (2, 1), "padding_mode": mode, "dtype": F64}
    same(P_world, "Conv2d", SHAPE, QUARTERS, 4, 3, (5, 3), **options)


@pytest.mark.parametrize(
    "layer", ["ZeroPad2d", "CircularPad2d", "ReflectionPad2d", "ReplicationPad2d"]
)
@distributed(ranks=4, transports=LOOPBACK)
def test_padding_layers(P_world: Partition, layer: str) -> None:
    """DTensor 2.13 and ShardTensor: gather, or raise."""
    same(P_world, layer, SHAPE, QUARTERS, (1, 2, 3, 0))


@pytest.mark.parametrize(
    "kernel, stride, padding", [(3, 1, 0), (3, 2, 1), (4, 2, 0), (4, 2, 1), (2, 2, 0), (1, 2, 0)]
)
@distributed(ranks=3, transports=LOOPBACK)
def test_transposed_convolutions(
    P_world: Partition, kernel: int, stride: int, padding: int
) -> None:
    """DistDL's fork: shapes are wrong unless stride = kernel, since the halos are those of the
    convolution. ShardTensor: an odd kernel raises."""
    same(
        P_world, "ConvTranspose2d", (2, 4, 7, 4), [1, 1, 3, 1],
        4, 3, kernel, stride, padding, dtype=F64,
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [[3, 4], [6, 1], [0, 7]])
@distributed(ranks=2, transports=LOOPBACK)
def test_transposed_convolution_of_odd_shards(P_world: Partition, sizes: list[int]) -> None:
    """ShardTensor: raises; with output padding too."""
    same(
        P_world, "ConvTranspose1d", (2, 4, 7), [1, 1, 2], 4, 3, 3, 2, 1, 1, dtype=F64,
        sizes={2: sizes},
    )  # fmt: skip


@pytest.mark.parametrize("grid_shape", [ROWS, QUARTERS, [2, 1, 2, 1]], ids=str)
@distributed(ranks=4, transports=LOOPBACK)
def test_adaptive_pool(P_world: Partition, grid_shape: list[int]) -> None:
    """ShardTensor: the backward raises under torch 2.13. DistDL: has none."""
    for outputs in (1, 2, (3, 5)):
        same(P_world, "AdaptiveAvgPool2d", SHAPE, grid_shape, outputs)
        same(P_world, "AdaptiveMaxPool2d", SHAPE, grid_shape, outputs)


@pytest.mark.parametrize("layer", ["MaxPool2d", "AvgPool2d"])
@distributed(ranks=4, transports=LOOPBACK)
def test_pools_with_ceil_mode(P_world: Partition, layer: str) -> None:
    """DistDL: no such argument. ShardTensor: raises where windows do not divide the shards."""
    same(P_world, layer, SHAPE, QUARTERS, 3, 2, 1, ceil_mode=True)


@distributed(ranks=2, transports=LOOPBACK)
def test_indices_of_the_maxima_are_global(P_world: Partition) -> None:
    """DistDL: no such argument; others would count within a block."""
    P_x = grid(P_world, ROWS)
    whole = random_like_all((2, 3, 8, 6), 1)
    expected, where_expected = torch.nn.MaxPool2d(2, return_indices=True)(whole)
    y, indices = nn.DistributedMaxPool2d(P_x, 2, return_indices=True)(own_block(whole, P_x))
    where = own_slices(expected.shape, P_x)
    assert_block_of(y.detach(), expected, where, "maxima")
    assert where is not None and torch.equal(indices, where_expected[where])


def same_norm(P_world: Partition, layer: str, grid_shape: list[int], *arguments: Any) -> None:
    options: dict[str, Any] = {}
    if layer.startswith("Instance"):
        options = {"affine": True, "track_running_stats": True}
    same(P_world, layer, (4, 4, 9, 8), grid_shape, *arguments, dtype=F64, **options)


@pytest.mark.parametrize("grid_shape", [ROWS, QUARTERS, [2, 1, 2, 1], [1, 2, 2, 1]], ids=str)
@pytest.mark.parametrize(
    "layer, arguments", [("BatchNorm2d", (4,)), ("InstanceNorm2d", (4,)), ("GroupNorm", (2, 4))]
)
@distributed(ranks=4, transports=LOOPBACK)
def test_norms_over_several_split_dims(
    P_world: Partition, layer: str, arguments: tuple[int, ...], grid_shape: list[int]
) -> None:
    """DTensor 2.13: gathers, and the backward of batch norm with split channels hung (182739).
    ShardTensor: batch and instance norm raise in backward, group norm on a mesh of two dims."""
    same_norm(P_world, layer, grid_shape, *arguments)


@distributed(ranks=3, transports=LOOPBACK)
def test_groups_across_blocks_of_channels(P_world: Partition) -> None:
    """No other library supports a group whose channels are on two ranks."""
    same_norm(P_world, "GroupNorm", [1, 3, 1, 1], 2, 4)


@distributed(ranks=4, transports=LOOPBACK)
def test_running_statistics_of_batch_norm(P_world: Partition) -> None:
    """DistDL: the running variance is the biased one, an inactive rank raises, and the count of a
    cumulative average is not in the state."""
    for momentum in (0.1, None):
        P_x = grid(P_world, [1, 1, 3, 1])
        sequential = torch.nn.BatchNorm2d(3, momentum=momentum, dtype=F64)
        layer = nn.DistributedBatchNorm2d(P_x, 3, momentum=momentum, dtype=F64)
        for seed in range(3):
            whole = 3 * random_like_all((2, 3, 5, 4), seed) + 1
            sequential(whole)
            layer(own_block(whole, P_x))
        if not P_x.active:
            continue
        mine, theirs = layer.state_dict(), sequential.state_dict()
        for name in ("running_mean", "running_var"):
            assert_equal_to(mine[name].flatten(), theirs[name], 1e-10, name)
        assert mine["num_batches_tracked"] == 3
        x = random_like_all((2, 3, 5, 4), 9)
        expected = sequential.eval()(x).detach()
        y = layer.eval()(own_block(x, P_x)).detach()
        assert_block_of(y, expected, own_slices(x.shape, P_x), "in eval mode")


@pytest.mark.parametrize("grid_shape", [[2, 1, 1], [1, 1, 3], [1, 2, 2], [1, 3, 1]], ids=str)
@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm"])
@distributed(ranks=4, transports=LOOPBACK)
def test_norms_over_split_features(P_world: Partition, layer: str, grid_shape: list[int]) -> None:
    """DistDL's fork: layer norm averages the means of uneven blocks as if they were even; RMS norm
    refuses split features, and another layer norm normalizes each block alone."""
    for normalized in ((7,), (5, 7)):
        dims = range(-len(normalized), 0)
        same(P_world, layer, (4, 5, 7), grid_shape, normalized, dtype=F64, parameter_dims=dims)


@distributed(ranks=2, transports=LOOPBACK)
def test_layer_norm_of_uneven_blocks(P_world: Partition) -> None:
    """DistDL's fork: wrong, since the means of blocks of 6 and of 1 cell count alike."""
    sizes = {1: [6, 1]}
    P_x = grid(P_world, [1, 2])
    whole = random_like_all((3, 7), 1)
    layer = nn.DistributedLayerNorm(P_x, 7, elementwise_affine=False)
    expected = torch.nn.LayerNorm(7, elementwise_affine=False)(whole)
    y = layer(own_block(whole, P_x, sizes)).detach()
    assert_block_of(y, expected, own_slices((3, 7), P_x, sizes), "output")


UPSAMPLED: dict[str, dict[str, Any]] = {
    "bilinear, align_corners": {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    "bilinear by 1.5": {"scale_factor": 1.5, "mode": "bilinear"},
    "nearest by 2.3": {"scale_factor": 2.3, "mode": "nearest"},
    "nearest-exact by 2.3": {"scale_factor": 2.3, "mode": "nearest-exact"},
    "nearest, size": {"size": (13, 5), "mode": "nearest"},
    "bilinear, size": {"size": (13, 5), "mode": "bilinear"},
    "one cell, align_corners": {"size": (1, 1), "mode": "bilinear", "align_corners": True},
    "area": {"size": (4, 3), "mode": "area"},
    "down": {"scale_factor": 0.4, "mode": "bilinear"},
}


@pytest.mark.parametrize("case", UPSAMPLED)
@distributed(ranks=4, transports=LOOPBACK)
def test_upsample(P_world: Partition, case: str) -> None:
    """ShardTensor: wrong with ``align_corners``, and ``size`` raises. DistDL: a fractional scale
    gives other cells than torch's nearest (error 0.45), and one cell of output with
    ``align_corners`` divides by zero."""
    same(P_world, "Upsample", SHAPE, QUARTERS, **UPSAMPLED[case])


@distributed(ranks=3, transports=LOOPBACK)
def test_upsample_in_one_and_three_dims(P_world: Partition) -> None:
    """DistDL: computed on the CPU alone; DTensor 2.13: gathers."""
    same(P_world, "Upsample", (2, 3, 7), [1, 1, 3], None, 2.5, "linear")
    same(P_world, "Upsample", (1, 2, 3, 4, 5), [1, 1, 3, 1, 1], None, 2, "trilinear")


@distributed(ranks=4, transports=LOOPBACK)
def test_linear_over_a_split_batch_and_split_features(P_world: Partition) -> None:
    """DistDL: two dims, with a batch that is whole."""
    P_x, P_y = grid(P_world, [2, 2]), grid(P_world, [2, 1])
    P_w = grid(P_world, [2, 1, 2])
    torch.manual_seed(1)
    sequential = torch.nn.Linear(6, 4, dtype=F64)
    torch.manual_seed(1)
    layer = nn.DistributedLinear(P_x, P_y, P_w, 6, 4, dtype=F64)
    whole = random_like_all((5, 6), 1)
    expected = sequential(whole).detach()
    y = layer(own_block(whole, P_x)).detach()
    assert_block_of(y, expected, own_slices(expected.shape, P_y), "output")


def probabilities(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return random_like_all(shape, seed).sigmoid()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@distributed(ranks=5, transports=LOOPBACK)
def test_losses_with_all_their_arguments(P_world: Partition, reduction: str) -> None:
    """DistDL: no weights, no ``log_target``, no ``log_input``; no smooth L1 and no NLL; the value
    is on rank 0 alone, and an inactive rank raises."""
    shape, grid_shape = (4, 6, 5), [2, 1, 2]
    x, y = random_like_all(shape, 1), random_like_all(shape, 2)
    p, q = probabilities(shape, 3), probabilities(shape, 4)
    classes = torch.arange(20).reshape(4, 5) % 6
    weight = probabilities((6,), 5)
    kept: dict[str, Any] = {"reduction": reduction}
    same_loss(P_world, "SmoothL1Loss", grid_shape, x, y, beta=0.5, **kept)
    same_loss(P_world, "HuberLoss", grid_shape, x, y, delta=0.5, **kept)
    same_loss(P_world, "BCELoss", grid_shape, p, q, **kept)
    same_loss(P_world, "BCEWithLogitsLoss", grid_shape, x, q, **kept)
    same_loss(P_world, "KLDivLoss", grid_shape, x, y, log_target=True, **kept)
    same_loss(P_world, "PoissonNLLLoss", grid_shape, p, q, log_input=False, **kept)
    same_loss(P_world, "NLLLoss", grid_shape, x, classes, weight=weight, **kept)
    smooth = {"weight": weight, "label_smoothing": 0.1, **kept}
    same_loss(P_world, "CrossEntropyLoss", grid_shape, x, classes, **smooth)


@distributed(ranks=4, transports=LOOPBACK)
def test_kl_divergence_by_the_batch(P_world: Partition) -> None:
    """DistDL: has it, on rank 0 alone."""
    x, y = random_like_all((4, 6), 1), probabilities((4, 6), 2)
    same_loss(P_world, "KLDivLoss", [2, 2], x, y, reduction="batchmean")


@distributed(ranks=4, transports=LOOPBACK)
def test_embedding_with_the_vocabulary_split(P_world: Partition) -> None:
    """ShardTensor and DistDL: have none; DistDL's fork gathers the whole weight."""
    P_x, P_y = grid(P_world, [2, 1]), grid(P_world, [2, 1, 1])
    P_w = grid(P_world, [2, 1, 2, 1])
    torch.manual_seed(1)
    sequential = torch.nn.Embedding(7, 3, padding_idx=2, dtype=F64)
    torch.manual_seed(1)
    layer = nn.DistributedEmbedding(P_x, P_y, P_w, 7, 3, padding_idx=2, dtype=F64)
    indices = torch.arange(20).reshape(4, 5) % 7
    expected = sequential(indices).detach()
    mine = own_block(indices, P_x, requires_grad=False)
    assert_block_of(layer(mine).detach(), expected, own_slices((4, 5, 3), P_y), "output")
