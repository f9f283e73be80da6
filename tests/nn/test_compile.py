"""Compiled layers: the eager numbers, gradients included; and a network that learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from gpudist import nn
from gpudist.errors import ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import grid, own_block, own_slices, random_like_all
from tests.pool import distributed

F64 = torch.float64
Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def conv_on_one_partition(P_world: Partition) -> Made:
    """Rank 3 has an empty output, rank 2 no part."""
    P_x = grid(P_world, [1, 1, 3], [0, 1, 3])
    layers = torch.nn.Sequential(
        nn.DistributedConv1d(P_x, 2, 3, 3, padding=1, padding_mode="circular", dtype=F64),
        torch.nn.Tanh(),
        nn.DistributedConv1d(P_x, 3, 2, 4, stride=2, bias=False, dtype=F64),
    )
    sizes = {2: [1, 2, 4]}
    return layers, (own_block(random_like_all((2, 2, 7), 1), P_x, sizes),)


def convs_with_copied_padding(P_world: Partition) -> Made:
    """Rank 3 reads padding only, of which some is copied from other ranks."""
    P_x = grid(P_world, [1, 1, 3], [0, 1, 3])
    layers = torch.nn.Sequential(
        nn.DistributedConv1d(P_x, 2, 3, 3, padding=6, padding_mode="reflect", dtype=F64),
        torch.nn.Tanh(),
        nn.DistributedCausalConv1d(P_x, 3, 2, 4, padding_mode="replicate", dtype=F64),
    )
    sizes = {2: [1, 6, 0]}
    return layers, (own_block(random_like_all((2, 2, 7), 1), P_x, sizes),)


def pads(P_world: Partition) -> Made:
    P_x = grid(P_world, [1, 1, 3, 1], [0, 1, 3])
    layers = torch.nn.Sequential(
        nn.DistributedReflectionPad2d(P_x, (1, 2, 3, 0)),
        nn.DistributedReplicationPad2d(P_x, (0, 1, 2, 5)),
        nn.DistributedCircularPad2d(P_x, 1),
        nn.DistributedConstantPad2d(P_x, (0, 0, -2, 1), 0.5),
    )
    return layers, (own_block(random_like_all((2, 2, 4, 3), 1), P_x),)


def resampling(P_world: Partition) -> Made:
    """Rank 0 has no outputs of the last interpolation, rank 1 no part."""
    P_x = grid(P_world, [1, 1, 3, 1], [3, 2, 0])
    layers = torch.nn.Sequential(
        nn.DistributedUpsample(P_x, (9, 17)),
        nn.DistributedUpsample(P_x, (6, 12), mode="bilinear", align_corners=True),
        nn.DistributedPixelUnshuffle(P_x, 2),
        nn.DistributedChannelShuffle(P_x, 4),
        nn.DistributedPixelShuffle(P_x, 2),
        nn.DistributedUpsample(P_x, (2, 7), mode="area"),
        torch.nn.Tanh(),
    )
    return layers, (own_block(random_like_all((2, 2, 5, 4), 1), P_x),)


def softmaxes(P_world: Partition) -> Made:
    """Rank 3 has no cells, rank 2 no part."""
    P_x = grid(P_world, [1, 3], [0, 1, 3])
    layers = torch.nn.Sequential(
        nn.DistributedSoftmin(P_x, 1),
        nn.DistributedLogSoftmax(P_x, -1),
        nn.DistributedSoftmax(P_x, 0),
    )
    return layers, (own_block(random_like_all((2, 5), 1), P_x, {1: [2, 3, 0]}),)


def conv_with_split_channels(P_world: Partition) -> Made:
    P_x, P_y = grid(P_world, [1, 2, 1], [0, 1]), grid(P_world, [1, 1, 1], [3])
    layer = nn.DistributedConv1d(P_x, P_y, grid(P_world, [1, 2, 1], [1, 2]), 4, 3, 3, dtype=F64)
    return layer, (own_block(random_like_all((2, 4, 6), 1), P_x),)


def transposed_conv(P_world: Partition) -> Made:
    """Rank 0 has outputs that no cell reaches, rank 2 no part."""
    P_x = grid(P_world, [1, 1, 3], [3, 1, 0])

    class Sized(nn.DistributedConvTranspose1d):
        def forward(
            self, x: torch.Tensor, output_size: Sequence[int] | None = None
        ) -> torch.Tensor:
            return super().forward(x, output_size or [18])

    layers = torch.nn.Sequential(
        nn.DistributedConvTranspose1d(P_x, 2, 3, 3, 2, 1, 1, dtype=F64),
        torch.nn.Tanh(),
        Sized(P_x, 3, 2, 1, 9, 5, dtype=F64),
    )
    return layers, (own_block(random_like_all((2, 2, 2), 1), P_x),)


def transposed_conv_with_split_channels(P_world: Partition) -> Made:
    P_x, P_y = grid(P_world, [1, 2, 1], [0, 1]), grid(P_world, [1, 1, 1], [3])
    P_w = grid(P_world, [1, 2, 1], [1, 2])
    layer = nn.DistributedConvTranspose1d(P_x, P_y, P_w, 4, 3, 3, 2, dtype=F64)
    return layer, (own_block(random_like_all((2, 4, 6), 1), P_x),)


def pools(P_world: Partition) -> Made:
    P_x = grid(P_world, [2, 1, 2], [3, 2, 1, 0])
    layers = torch.nn.Sequential(
        nn.DistributedMaxPool1d(P_x, 3, 2, 1),
        nn.DistributedAvgPool1d(P_x, 2, 2, 1, ceil_mode=True, count_include_pad=False),
    )
    return layers, (own_block(random_like_all((5, 2, 9), 1), P_x, {0: [4, 1], 2: [2, 7]}),)


def adaptive_and_power_pools(P_world: Partition) -> Made:
    """Ranks 0 and 1 have an empty output."""
    P_x = grid(P_world, [1, 1, 2, 2], [3, 2, 1, 0])
    layers = torch.nn.Sequential(
        nn.DistributedLPPool2d(P_x, 2, 3, 1, ceil_mode=True),
        nn.DistributedAdaptiveMaxPool2d(P_x, (7, 3)),
        nn.DistributedAdaptiveAvgPool2d(P_x, (1, 2)),
    )
    return layers, (own_block(random_like_all((2, 2, 9, 8), 1).abs(), P_x, {2: [2, 7]}),)


def linear_layers(P_world: Partition) -> Made:
    P_x, P_rows = grid(P_world, [1, 2], [3, 0]), grid(P_world, [3, 1], [2, 1, 0])
    layers = torch.nn.Sequential(
        nn.DistributedLinear(P_x, P_x, grid(P_world, [2, 2]), 4, 7, dtype=F64),
        nn.Repartition(P_x, P_rows),
        nn.DistributedLinear(P_rows, 7, 2, dtype=F64),
    )
    return layers, (own_block(random_like_all((5, 4), 1), P_x),)


def replicated_parameters(P_world: Partition) -> Made:
    """Rank 3 has an empty output, rank 2 no part."""
    P_x = grid(P_world, [1, 1, 3], [0, 1, 3])
    layers = torch.nn.Sequential(
        nn.DistributedConv1d(P_x, 2, 3, 3, padding=1, dtype=F64, replicate_parameters=True),
        nn.DistributedBatchNorm1d(P_x, 3, dtype=F64, replicate_parameters=True),
        nn.DistributedConv1d(P_x, 3, 2, 4, stride=2, dtype=F64, replicate_parameters=True),
    )
    return nn.fuse_parameter_movements(layers), (own_block(random_like_all((2, 2, 7), 1), P_x),)


def norms(P_world: Partition) -> Made:
    """Return norms in training, with running statistics; two ranks have empty blocks."""
    P_x = grid(P_world, [1, 2, 2], [3, 1, 2, 0])
    layers = torch.nn.Sequential(
        nn.DistributedBatchNorm1d(P_x, 4, momentum=None, dtype=F64),
        torch.nn.Tanh(),
        nn.DistributedInstanceNorm1d(P_x, 4, affine=True, track_running_stats=True, dtype=F64),
        torch.nn.Tanh(),
    )
    return layers, (own_block(random_like_all((2, 4, 6), 1), P_x, {2: [0, 6]}),)


def more_norms(P_world: Partition) -> Made:
    P_x = grid(P_world, [1, 2, 2])
    layers = torch.nn.Sequential(
        nn.DistributedGroupNorm(P_x, 1, 4, dtype=F64),
        nn.DistributedLayerNorm(P_x, [4, 6], dtype=F64),
        nn.DistributedRMSNorm(P_x, 6, dtype=F64),
        torch.nn.Tanh(),
    )
    return layers, (own_block(random_like_all((2, 4, 6), 1), P_x),)


def losses(P_world: Partition) -> Made:
    P_x = grid(P_world, [2, 2], [3, 1, 2, 0])
    whole, target = random_like_all((5, 3), 1), torch.tensor([0, 2, 1, 2, -100])
    rows = own_slices((5, 2), P_x)
    assert rows is not None

    class Losses(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.losses = torch.nn.ModuleList(
                [nn.DistributedCrossEntropyLoss(P_x), nn.DistributedMSELoss(P_x)]
            )
            self.block = nn.DistributedL1Loss(P_x, "none")

        def forward(self, x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
            classes, squares = self.losses
            values = classes(x, target[rows[0]]) * squares(x, expected)
            return values + self.block(x, expected)

    expected = own_block(random_like_all((5, 3), 2), P_x, requires_grad=False)
    return Losses(), (own_block(whole, P_x), expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        conv_on_one_partition,
        convs_with_copied_padding,
        pads,
        resampling,
        softmaxes,
        conv_with_split_channels,
        transposed_conv,
        transposed_conv_with_split_channels,
        pools,
        adaptive_and_power_pools,
        linear_layers,
        replicated_parameters,
        norms,
        more_norms,
        losses,
    ],
)
@distributed(ranks=4, transports=["host"])
def test_layer(P_world: Partition, make: Callable[[Partition], Made]) -> None:
    module, inputs = make(P_world)
    torch.compiler.reset()
    results: list[list[torch.Tensor | None]] = []
    for function in (torch.compile(module, fullgraph=True, backend="aot_eager"), module):
        module.zero_grad()
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        y = function(*leaves)
        y.pow(2).sum().backward()
        tensors = [*leaves, *module.parameters()]
        results.append([y.detach(), *[None if x.grad is None else x.grad.clone() for x in tensors]])
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@distributed(ranks=4, transports=["host"], timeout_s=120)
def test_a_network_learns_as_the_sequential_one(P_world: Partition) -> None:
    """Network and loss are one graph for each batch size; rank 3 has no part in the network."""
    P_x, P_y = grid(P_world, [1, 1, 2, 1], [1, 2]), grid(P_world, [2, 1], [0, 2])
    torch.manual_seed(1)
    reference = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(3 * 3 * 2, 4, dtype=F64),
    )
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        nn.DistributedConv2d(P_x, 2, 3, 3, padding=1, dtype=F64),
        torch.nn.ReLU(inplace=True),
        nn.DistributedMaxPool2d(P_x, 2),
        nn.Repartition(P_x, grid(P_world, [2, 1, 1, 1], [0, 2])),
        torch.nn.Flatten(),
        nn.DistributedLinear(P_y, 3 * 3 * 2, 4, dtype=F64),
    )
    criterion, reference_criterion = (
        nn.DistributedCrossEntropyLoss(P_y),
        torch.nn.CrossEntropyLoss(),
    )
    torch.compiler.reset()
    loss_of = torch.compile(
        lambda x, target: criterion(network(x), target), fullgraph=True, backend="aot_eager"
    )
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (network, reference)]
    for step, batch in enumerate((5, 5, 3, 5, 3)):
        whole, target = random_like_all((batch, 2, 6, 5), step), torch.arange(batch) % 4
        where = own_slices((batch, 4), P_y)
        block = target[:0] if where is None else target[where[0]]
        value = loss_of(own_block(whole, P_x), block)
        expected = reference_criterion(reference(whole), target)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
        for loss, optimizer in zip((value, expected), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@distributed(ranks=2, transports=["host"])
def test_a_wrong_target_is_refused_everywhere(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1])
    torch.compiler.reset()
    criterion = nn.DistributedCrossEntropyLoss(P_x)
    loss_of = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    x = random_like_all((1, 4), 1)
    loss_of(x, torch.tensor([2]))
    with pytest.raises(ShapeError, match="target 7 is not one of the classes 0 to 3"):
        loss_of(x, torch.tensor([7 if P_x.rank == 1 else 2]))
