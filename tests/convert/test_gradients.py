"""Gradients of parameters equal those of the network alone, summed once, by every method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpudist import amp, distribute, scatter
from gpudist.nn.utils import clip_grad_norm_
from gpudist.world.partition import Partition
from tests.convert.training import assert_gradients, assert_whole, loss_of
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

BOTH = pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
LOSSES = pytest.mark.parametrize("is_global", [True, False], ids=["global", "blocks"])
SHAPE = (3, 2, 7, 6)
TOLERANCE = 1e-10


class Mixed(nn.Module):
    """A scaled weight in plain code, one that is frozen and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.direction = nn.Parameter(torch.randn(3, 4, 1, 1))
        self.length = nn.Parameter(torch.rand(3, 1, 1, 1))
        self.frozen = nn.Parameter(torch.randn(4, 1, 1), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.conv(x)) * self.frozen
        weight = self.length * self.direction / self.direction.norm()
        return F.conv2d(y, weight) + self.length.mean()


def both(P_world: Partition, **options: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Return the network alone, converted, an image and this worker's block of it."""
    torch.manual_seed(3)
    alone = Mixed().double()
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [1, 1, 2, 1]), **options)
    whole = random_like_all(SHAPE, 1)
    return alone, net, whole, own_block(whole, net.P_x)


@BOTH
@LOSSES
@distributed(ranks=3)
def test_accumulated_backwards(P_world: Partition, replicate: bool, is_global: bool) -> None:
    """Three of them; what is frozen or unused has no gradient on any rank."""
    alone, net, whole, block = both(P_world, replicate_parameters=replicate)
    for i in range(3):
        y = alone(whole * i)
        cotangent = random_like_all(y.shape, i)
        (y * cotangent).sum().backward()
        loss_of(net(block * i), cotangent, is_global).backward()
    assert_gradients(net, alone, net.P_x.active, TOLERANCE)
    assert net.frozen.grad is None and net.unused.weight.grad is None


@LOSSES
@distributed(ranks=2, transports=["loopback", "host"])
def test_gradients_by_function(P_world: Partition, is_global: bool) -> None:
    """Call ``torch.autograd.grad`` twice over one graph, and ``backward`` after it."""
    alone, net, whole, block = both(P_world)
    names = ["conv.weight", "length", "direction"]
    expected_loss = alone(whole).square().sum()
    expected = torch.autograd.grad(expected_loss, [alone.get_parameter(n) for n in names])
    y = net(block)
    loss = y.square().sum() if is_global else y.to_local().square().sum()
    parameters = [net.get_parameter(n) for n in names]
    for _ in range(2):
        found = torch.autograd.grad(loss, parameters, retain_graph=True)
        for name, a, b in zip(names, found, expected, strict=True):
            assert_equal_to(a, b, TOLERANCE, name)
    loss.backward(retain_graph=True)
    loss.backward()
    for name, b in zip(names, expected, strict=True):
        assert_equal_to(net.get_parameter(name).grad, 2 * b, TOLERANCE, name)


@distributed(ranks=2, transports=["loopback", "host"])
def test_gradient_of_a_gradient(P_world: Partition) -> None:
    """A penalty on the gradient of the input."""
    alone, net, whole, block = both(P_world)
    whole = whole.requires_grad_()
    (slope,) = torch.autograd.grad(alone(whole).square().sum(), whole, create_graph=True)
    slope.square().sum().backward()
    (own,) = torch.autograd.grad(net(block).square().sum(), block, create_graph=True)
    own.square().sum().backward()
    for name in ("conv.weight", "length", "direction"):
        expected = alone.get_parameter(name).grad
        assert_equal_to(net.get_parameter(name).grad, expected, TOLERANCE, name)


@BOTH
@distributed(ranks=2, transports=["loopback", "host"])
def test_clipped_gradients(P_world: Partition, replicate: bool) -> None:
    alone, net, whole, block = both(P_world, replicate_parameters=replicate)
    alone(whole).square().mean().backward()
    net(block).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    found = clip_grad_norm_(net, 0.01)
    assert expected > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert_gradients(net, alone, active=True, tolerance=TOLERANCE)


@distributed(ranks=2, transports=["loopback"])
def test_clipped_by_torch(P_world: Partition) -> None:
    """Replicated parameters have whole gradients."""
    alone, net, whole, block = both(P_world)
    alone(whole).square().mean().backward()
    net(block).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    found = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert_gradients(net, alone, active=True, tolerance=TOLERANCE)


@distributed(ranks=2, transports=["loopback", "host"])
def test_infinite_gradient_on_one_rank(P_world: Partition) -> None:
    """All workers skip the step."""
    _, net, _, block = both(P_world)
    scaler: Any = amp.GradScaler(net.P_x, init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.detach().clone() for p in net.parameters()]
    loss = net(block).to_local().sum()
    if P_world.rank == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    optimizer.zero_grad()
    scaler.scale(net(block).sum()).backward()
    scaler.step(optimizer)
    assert not all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@distributed(ranks=4, transports=["loopback"])
def test_optimizers_with_cut_weights(P_world: Partition, optimizer: str) -> None:
    from gpudist import Plan, sequential

    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5)).double()
    plan = Plan()
    plan.split_weight("0", (1, 4, 1))
    plan.split_weight("2", (2, 1, 2))
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [4, 1]), plan)
    blocks = net.state_dict()
    assert blocks["0.weight"].shape == (2, 6) and blocks["2.weight"].shape == (5, 4)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (alone, net)]
    for step in range(3):
        whole = random_like_all((7, 6), step)
        for one in optimizers:
            one.zero_grad()
        y_whole, y = alone(whole), net(own_block(whole, net.P_x))
        assert_whole(y, y_whole, f"output of step {step}")
        y_whole.square().mean().backward()
        y.square().mean().backward()
        for one in optimizers:
            one.step()
    back = sequential(net)
    assert back is not None
    for key, value in back.state_dict().items():
        assert_equal_to(value, alone.state_dict()[key], 1e-9, key)


class Checkpointed(nn.Module):
    """Recomputes a module whose weights one worker holds and all workers use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 2, 3, padding=1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.conv, x, use_reentrant=False).exp()


@distributed(ranks=3, transports=("loopback",))
def test_recomputed_module_with_one_owner(P_world: Any) -> None:
    x = torch.linspace(0, 9, 2 * 2 * 7 * 4, dtype=torch.float64).sin().view(2, 2, 7, 4)
    alone, P_x = Checkpointed(), P_world.grid(1, 1, 3, 1)
    alone(x).square().mean().backward()
    net: Any = distribute(Checkpointed(), P_x, replicate_parameters=False)
    net(scatter(x, P_x)).square().mean().backward()
    for a, b in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
