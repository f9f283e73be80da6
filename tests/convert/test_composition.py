"""Converted networks in torch's tools: compiled, recomputed, differentiated twice, in inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gpudist.convert import distribute
from gpudist.partition import CartesianPartition, Partition
from tests.convert.networks import NETWORKS
from tests.convert.test_distribute import check_gradients
from tests.nn.compare import (
    assert_block_of,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

TOLERANCE = 1e-9
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class SmallUNet(torch.nn.Module):
    """One level; the size of a tensor, and a parameter beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.GroupNorm(2, 2), torch.nn.PReLU(2)
        )
        self.bottom = torch.nn.Sequential(
            torch.nn.MaxPool2d(2), torch.nn.Conv2d(2, 2, 3, padding=1), torch.nn.Softplus()
        )
        self.grow = torch.nn.ConvTranspose2d(2, 2, 2, stride=2)
        self.scale = torch.nn.Parameter(torch.full((2, 1, 1), 0.5))
        self.head = torch.nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        low = self.bottom(skip)
        high = F.interpolate(low, size=skip.shape[-2:], mode="bilinear")
        return self.head(torch.cat([skip * self.scale, torch.tanh(self.grow(low)), high], 1))


SHAPE = (2, 1, 8, 6)


def both(P_x: CartesianPartition) -> tuple[Any, Any]:
    torch.manual_seed(3)
    alone = SmallUNet().double()
    return alone, distribute(alone, P_x)


def compare(P_x: CartesianPartition, alone: Any, net: Any, forward: Forward, seed: int = 1) -> None:
    """``forward`` of the converted network against that of the network alone, with gradients."""

    whole = random_like_all(SHAPE, seed).requires_grad_()
    block = own_block(whole, P_x)
    y_whole, y = alone(whole), forward(net, block)
    where = own_slices(y_whole.shape, P_x)
    assert_block_of(y.detach(), y_whole.detach(), where, "output", TOLERANCE)
    cotangent = random_like_all(y_whole.shape, seed + 9)
    for model in (alone, net):
        model.zero_grad()
    y_whole.backward(cotangent)
    y.backward(torch.zeros_like(y) if where is None else cotangent[where])
    slices = own_slices(SHAPE, P_x)
    assert_block_of(block.grad, gradient_of(whole), slices, "input gradient", TOLERANCE)
    check_gradients(net, alone, P_x.active)


@distributed(ranks=2, transports=["host"], timeout_s=240)
def test_is_one_graph(P_world: Partition) -> None:
    torch.compiler.reset()
    P_x = grid(P_world, [1, 1, 2, 1])
    alone, net = both(P_x)
    graph = torch.compile(net, fullgraph=True, backend="aot_eager")
    compare(P_x, alone, net, lambda _, x: graph(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shape", [[1, 1, 2, 2], [1, 1, 5, 1]], ids=str)
@distributed(ranks=6, transports=["loopback"])
def test_parts_are_recomputed(P_world: Partition, shape: list[int], reentrant: bool) -> None:
    """Of five blocks of four rows at the bottom one is empty; a rank has no part in the network."""
    P_x = grid(P_world, shape)
    alone, net = both(P_x)
    for part in ("down", "bottom", "grow"):
        recompute(getattr(net, part), reentrant)
    for seed in (1, 2):
        compare(P_x, alone, net, lambda model, x: model(x), seed)


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(ranks=4, transports=["host"])
def test_the_whole_is_recomputed(P_world: Partition, reentrant: bool) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    alone, net = both(P_x)

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        found: Any = checkpoint(model, x, use_reentrant=reentrant)
        return found

    compare(P_x, alone, net, forward)


def recompute(module: Any, reentrant: bool) -> None:
    """Make the module's forward a checkpointed one."""
    forward = module.forward
    module.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)


@distributed(ranks=4, transports=["loopback"])
def test_gradient_penalty(P_world: Partition) -> None:
    """The norm of the gradient of the output by the input is part of the loss."""
    P_x = grid(P_world, [1, 1, 2, 2])
    alone, net = both(P_x)
    whole = random_like_all(SHAPE, 1).requires_grad_()
    block = own_block(whole, P_x)
    slices = own_slices(SHAPE, P_x)
    gradients = [penalized(alone, whole), penalized(net, block)]
    assert_block_of(gradients[1], gradients[0], slices, "first gradient", TOLERANCE)
    assert_block_of(block.grad, gradient_of(whole), slices, "second gradient", TOLERANCE)
    check_gradients(net, alone, True)


def penalized(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Backward of this worker's part of a loss with a penalty; returns the first gradient."""
    y = model(x)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (y.square().sum() + gradient.square().sum()).backward()
    return gradient.detach()


@pytest.mark.parametrize("name", ["unet", "convnext"])
@distributed(ranks=4, transports=["host"])
def test_nothing_is_agreed_again_without_gradients(P_world: Partition, name: str) -> None:
    """The first call agrees; then as many messages whatever the mode, and the same output."""
    make, shape, shapes = NETWORKS[name]
    torch.manual_seed(3)
    P_x = grid(P_world, shapes[0])
    net = distribute(make().double().eval(), P_x)
    x = own_block(random_like_all(shape, 1), P_x)
    expected = net(x).detach()

    def messages(context: Any) -> int:
        before = P_world.wire.recorder.count
        with context:
            y = net(x)
        assert torch.equal(y.detach(), expected)
        return P_world.wire.recorder.count - before

    modes = [torch.enable_grad, torch.no_grad, torch.inference_mode]
    counts = [messages(mode()) for mode in (*modes, *modes)]
    assert len(set(counts)) == 1 and counts[0] > 0
    net(x).sum().backward()
    assert x.grad is not None


@distributed(ranks=2, transports=["host"])
def test_first_call_may_be_in_inference(P_world: Partition) -> None:
    """What is remembered of it is of use where gradients are taken."""
    P_x = grid(P_world, [1, 1, 2, 1])
    alone, net = both(P_x)
    with torch.inference_mode():
        net(own_block(random_like_all(SHAPE, 1), P_x))
    compare(P_x, alone, net, lambda model, x: model(x))
