"""Layers of ``gpudist.nn`` on global tensors, against torch's on whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError
from gpudist.sbp import GlobalTensor, Placement
from gpudist.world.partition import CartesianPartition, Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, P, S, random


def grid(P_world: Partition, shape: list[int]) -> CartesianPartition:
    ranks = range(torch.Size(shape).numel())
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def assert_layer(
    layer: Any, sequential: Any, x: torch.Tensor, placement: Placement, sbp: Any, lies: Any
) -> None:
    """Check output, layout and gradients; twice, the second time without an agreement."""
    for _ in range(2):
        layer.zero_grad()
        sequential.zero_grad()
        needs = x.is_floating_point()
        whole = x.clone().requires_grad_(needs)
        part = global_of(x, placement, sbp, needs)
        expected, y = sequential(whole), layer(part)
        assert_global(y, expected)
        assert (y.placement, y.sbp) == lies
        seed = random(tuple(expected.shape), 9)
        expected.backward(seed)
        y.backward(seed)
        if needs:
            assert part.grad is not None and whole.grad is not None
            assert_global(part.grad, whole.grad)
        for own, other in zip(layer.parameters(), sequential.parameters(), strict=True):
            if own.shape == other.shape and own.numel():
                torch.testing.assert_close(own.grad, other.grad)


@distributed(ranks=5, transports=("loopback",))
def test_one_partition(P_world: Partition) -> None:
    """The output has the input's layout; a rank outside takes part without cells."""
    P_x = grid(P_world, [1, 1, 2, 2])
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    pairs: list[tuple[Any, Any]] = [
        (nn.DistributedConv2d(P_x, 4, 3, 3, stride=2, padding=1), torch.nn.Conv2d),
        (nn.DistributedMaxPool2d(P_x, 3, 2), torch.nn.MaxPool2d(3, 2)),
        (nn.DistributedGroupNorm(P_x, 2, 4), torch.nn.GroupNorm(2, 4)),
        (nn.DistributedConvTranspose2d(P_x, 4, 3, 2, 2), torch.nn.ConvTranspose2d),
        (nn.DistributedUpsample(P_x, scale_factor=2), torch.nn.Upsample(scale_factor=2)),
        (nn.DistributedAdaptiveAvgPool2d(P_x, 3), torch.nn.AdaptiveAvgPool2d(3)),
        (nn.DistributedZeroPad2d(P_x, 1), torch.nn.ZeroPad2d(1)),
        (nn.DistributedSoftmax(P_x, 3), torch.nn.Softmax(3)),
    ]
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(4, 3, 3, stride=2, padding=1).double()
    torch.manual_seed(0)
    pairs[0] = (nn.DistributedConv2d(P_x, 4, 3, 3, stride=2, padding=1).double(), conv)
    torch.manual_seed(0)
    transposed = torch.nn.ConvTranspose2d(4, 3, 2, 2).double()
    torch.manual_seed(0)
    pairs[3] = (nn.DistributedConvTranspose2d(P_x, 4, 3, 2, 2).double(), transposed)
    x = random((2, 4, 7, 9))
    for layer, sequential in pairs:
        lies = placement, (S(2), S(3))
        assert_layer(layer.double(), sequential.double(), x, placement, (S(2), S(3)), lies)
    # Other words for the same blocks.
    layer, sequential = pairs[1]
    own = Placement.of(P_x)
    for sbp in ((S(0), S(1), S(2), S(3)), (B, P, S(2), S(3))):
        assert_layer(layer, sequential, x, own, sbp, (own, sbp))


@distributed(ranks=4, transports=("loopback",))
def test_two_partitions(P_world: Partition) -> None:
    """Features and vocabularies are split, and the output has the layout of ``P_y``."""
    P_x = grid(P_world, [1, 2])
    torch.manual_seed(0)
    sequential = torch.nn.Linear(5, 7).double()
    torch.manual_seed(0)
    P_w = grid(P_world, [2, 2])
    layer = nn.DistributedLinear(P_x, grid(P_world, [1, 2]), P_w, 5, 7).double()
    placement = Placement.of(P_x)
    lies = placement, (B, S(1))
    assert_layer(layer, sequential, random((3, 5)), placement, (B, S(1)), lies)
    flat = Placement("cpu", [0, 1, 2, 3], P_world)
    torch.manual_seed(0)
    layer = nn.DistributedLinear(grid(P_world, [4, 1]), 5, 7).double()
    assert_layer(layer, sequential, random((6, 5)), flat, (S(0),), (flat, (S(0),)))
    torch.manual_seed(0)
    table = torch.nn.Embedding(9, 4).double()
    torch.manual_seed(0)
    P_i = grid(P_world, [2, 1])
    layer = nn.DistributedEmbedding(P_i, 9, 4).double()
    indices = torch.arange(15).reshape(5, 3) % 9
    lies = Placement.of(P_i), (S(0), S(1))
    assert_layer(layer, table, indices, *lies, lies)
    P_c = grid(P_world, [1, 2])
    torch.manual_seed(0)
    layer = nn.DistributedEmbedding(grid(P_world, [1]), P_c, grid(P_world, [2, 2]), 9, 4).double()
    alone = Placement("cpu", [0], P_world)
    lies = Placement.of(P_c), (S(1), S(2))
    assert_layer(layer, table, indices, alone, (B,), lies)


@distributed(ranks=5, transports=("loopback",))
def test_losses(P_world: Partition) -> None:
    """A loss is one number on every rank, and its gradient counts once."""
    P_x = grid(P_world, [1, 2, 2])
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x, target = random((3, 4, 5)), random((3, 4, 5), 1)
    whole = x.clone().requires_grad_()
    for reduction in ("mean", "sum"):
        part = global_of(x, placement, (S(1), S(2)), True)
        layer = nn.DistributedMSELoss(P_x, reduction=reduction)
        loss = layer(part, global_of(target, placement, (S(1), S(2))))
        expected = torch.nn.functional.mse_loss(whole, target, reduction=reduction)
        assert loss.sbp == (B, B)
        assert_global(loss, expected)
        (2 * loss).backward()
        (gradient,) = torch.autograd.grad(2 * expected, whole)
        assert part.grad is not None
        assert_global(part.grad, gradient)
    part = global_of(x, placement, (S(1), S(2)), True)
    classes = torch.arange(15).reshape(3, 5) % 4
    loss = nn.DistributedCrossEntropyLoss(P_x)(part, global_of(classes, placement, (B, S(1))))
    expected = torch.nn.functional.cross_entropy(whole, classes)
    assert_global(loss, expected)
    loss.backward()
    (gradient,) = torch.autograd.grad(expected, whole)
    assert part.grad is not None
    assert_global(part.grad, gradient)
    layer = nn.DistributedMSELoss(P_x, reduction="none")
    each = layer(part, global_of(target, placement, (S(1), S(2))))
    assert_global(each, torch.nn.functional.mse_loss(x, target, reduction="none"))
    with pytest.raises(NotImplementedError, match="split classes"):
        nn.DistributedCrossEntropyLoss(P_x, reduction="none")(
            part, global_of(classes, placement, (B, S(1)))
        )


@distributed(ranks=4, transports=("loopback",))
def test_a_network_and_its_optimizer(P_world: Partition) -> None:
    """Layers, torch's own modules and operators between them, and a step of descent."""
    P_x = grid(P_world, [1, 1, 2, 2])
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)

    def network(conv: Any, *where: Any) -> Any:
        torch.manual_seed(0)
        layers = [conv(*where, 2, 4, 3, padding=1), torch.nn.ReLU(), conv(*where, 4, 2, 3, 1, 1)]
        return torch.nn.Sequential(*layers).double()

    own, other = network(nn.DistributedConv2d, P_x), network(torch.nn.Conv2d)
    x = random((2, 2, 7, 5))
    for _ in range(2):
        part = global_of(x, placement, (S(2), S(3)))
        y = own(part) + part
        assert isinstance(y, GlobalTensor) and y.sbp == (S(2), S(3))
        expected = other(x) + x
        assert_global(y, expected)
        for net, output in ((own, y), (other, expected)):
            optimizer = torch.optim.SGD(net.parameters(), 0.01)
            optimizer.zero_grad()
            output.backward(torch.ones_like(x))
            optimizer.step()


@distributed(ranks=4, transports=("loopback",))
def test_what_does_not_fit_is_named(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    conv = nn.DistributedConv2d(P_x, 2, 3, 3).double()
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((1, 2, 6, 6))
    needed = r"needs the blocks of P_x: \(split\(0\), split\(1\), split\(2\), split\(3\)\) on pl"
    before = P_world.wire.recorder.count
    for sbp in ((S(3), S(2)), (B, S(3)), (P, S(2)), (S(2), S(2)), (S(2, [1, 5]), S(3))):
        with pytest.raises(PartitionError, match=needed):
            conv(global_of(x, placement, sbp))
    with pytest.raises(PartitionError, match=needed):
        conv(x=global_of(x, Placement("cpu", [[1, 0], [2, 3]], P_world), (S(2), S(3))))
    with pytest.raises(PartitionError, match="use a tensor with at least"):
        conv(global_of(random((2, 6, 6)), placement, (S(1), S(2))))
    with pytest.raises(PartitionError, match="plain tensor"):
        conv(global_of(x, placement, (S(2), S(3))), x)
    assert P_world.wire.recorder.count == before
    y = conv(global_of(x, placement, (B, B)).to_global(sbp=(S(2), S(3))))
    assert tuple(y.shape) == (1, 3, 4, 4)
