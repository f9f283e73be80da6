"""``autograd.Function.apply`` on global tensors, in converted networks and outside of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist.errors import ConversionError
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.functions import WAYS, Scaled, scaled

T = torch.Tensor


class Network(nn.Module):
    """A convolution, and what is done with its output and a weight, in the forward or outside."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.w = nn.Parameter(torch.tensor([0.5, -1.5]).view(2, 1, 1))
        self.way = way

    def forward(self, x: T) -> T:
        y = self.conv(x)
        return self.way(y, self.w) if self.way else y


def network(way: Any = None) -> Network:
    made = Network(way).double()
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(torch.linspace(-1, 1 + i, p.numel(), dtype=p.dtype).cos().view(p.shape))
    return made


def gradients(made: Any, y: T) -> list[T | None]:
    (y.square().mean() + y.mean()).backward()
    return [p.grad for p in made.parameters()]


def images() -> T:
    return torch.linspace(0, 40, 2 * 2 * 5 * 4, dtype=torch.float64).sin().view(2, 2, 5, 4)


@pytest.mark.filterwarnings("ignore:.*rule for blocks:UserWarning")
@pytest.mark.filterwarnings("ignore:.*are gathered by moving:UserWarning")
@distributed(ranks=2, transports=("loopback",))
def test_every_way_to_apply_a_function(P_world: Partition) -> None:
    """Values and gradients are those of the sequential program, inside and outside."""
    P_x = P_world.grid(1, 1, 2, 1)
    block = gpudist.scatter(images(), P_x)
    plain: Any = gpudist.distribute(network(), P_x)
    failures: list[str] = []
    for name, way in WAYS.items():
        alone = network()
        expected = way(alone.conv(images()), alone.w)
        wanted = gradients(alone, expected)
        for is_inside in (True, False):
            net: Any = gpudist.distribute(network(way), P_x) if is_inside else plain
            net.zero_grad()
            y = net(block)
            y: Any = y if is_inside else way(y, net.w)
            found = gradients(net, y)
            alike = [torch.allclose(y.full_tensor(), expected, atol=1e-6)]
            for a, b in zip(found, wanted, strict=True):
                alike.append(a is b if a is None or b is None else torch.allclose(a, b, atol=1e-6))
            if not all(alike):
                failures.append(f"{name}, {'inside' if is_inside else 'outside'}: {alike}")
    assert not failures, "\n".join(failures)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:
        return 2 * gradients[0]


def reading(y: T) -> type[torch.autograd.Function]:
    """Return a function that reads ``y`` without being given it."""

    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: T) -> T:
            return w * y

        @staticmethod
        def backward(ctx: Any, *gradients: T) -> T:
            return gradients[0].sum()

    return Reading


@pytest.mark.filterwarnings("ignore:.*rule for blocks:UserWarning")
@distributed(ranks=2, transports=("loopback",))
def test_functions_that_would_lose_a_gradient_raise(P_world: Partition) -> None:
    P_x = P_world.grid(1, 1, 2, 1)
    net: Any = gpudist.distribute(network(), P_x)
    block = gpudist.scatter(images(), P_x)
    y, w = net(block), torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ConversionError, match=r"Reading\.apply: .* as arguments of apply"):
        reading(y).apply(w)
    with pytest.raises(ConversionError, match=r"InPlace\.apply: .* return a new tensor"):
        InPlace.apply(y * 1)
    with pytest.raises(ConversionError, match=r"CheckpointFunction\.apply: .* use_reentrant=False"):
        checkpoint(net, block.clone().requires_grad_(), use_reentrant=True)
    with torch.no_grad():
        again = checkpoint(net, block.requires_grad_(), use_reentrant=True)
        for found in (reading(y).apply(w), Scaled.apply(y), again):
            assert not found.requires_grad
        assert torch.equal(reading(y).apply(w).full_tensor(), y.full_tensor())
    assert not scaled(y.detach()).requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
@distributed(ranks=2, transports=("loopback",))
def test_networks_repeat_their_draws_in_a_checkpoint(P_world: Partition, reentrant: bool) -> None:
    """A checkpoint around networks recomputes them with the numbers of the forward."""
    P_x = P_world.grid(1, 1, 2, 1)
    first: Any = gpudist.distribute(network(), P_x)
    second: Any = gpudist.distribute(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), P_x)
    h = first(gpudist.scatter(images(), P_x))
    h.retain_grad()

    def twice(h: T) -> T:
        return second(h) * second(h)

    y = checkpoint(twice, h, use_reentrant=reentrant)
    second(h)  # draws in between
    value = y.full_tensor().detach()
    y.sum().backward()
    # The derivative of c * h**2 is 2 * c * h.
    wanted = 2 * value / h.full_tensor().detach()
    torch.testing.assert_close(h.grad.full_tensor(), wanted)


@distributed(ranks=2, transports=("loopback",))
def test_backward_hooks_outside_of_a_network(P_world: Partition) -> None:
    """Full backward hooks of other modules receive and return global gradients."""
    head = nn.Tanh()
    head.register_full_backward_hook(lambda module, given, _: (given[0] / given[0].norm(),))
    alone = network()
    wanted = gradients(alone, head(alone(images())))
    net: Any = gpudist.distribute(network(), P_world.grid(1, 1, 2, 1))
    found = gradients(net, head(net(gpudist.scatter(images(), net.P_x))))
    for a, b in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:.*rule for blocks:UserWarning")
@distributed(ranks=3, transports=("loopback",))
def test_ranks_outside_the_placement(P_world: Partition) -> None:
    """They call the function on zeros, and learn the shapes of its results."""
    line = P_world.create_partition_inclusive([0, 2])
    P_x = line.create_cartesian_topology_partition([1, 1, 2, 1])
    net: Any = gpudist.distribute(network(), P_x)
    block = gpudist.scatter(images(), P_x)
    w = torch.full((), 2.0, dtype=torch.float64, requires_grad=True)
    y = scaled(net(block), 0.5)
    assert tuple(y.shape) == (2, 2, 5, 4)
    found = gradients(net, y * w)
    alone = network()
    v = w.detach().clone().requires_grad_()
    wanted = gradients(alone, scaled(alone(images()), 0.5) * v)
    if P_x.active:
        for a, b in zip([w.grad, *found[1:]], [v.grad, *wanted[1:]], strict=True):
            torch.testing.assert_close(a, b)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: T) -> T:
        return 2 * w

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:
        return 3 * gradients[0]


doubled = Doubled.apply


class Indirect(Network):
    """Applies a function to a parameter that it finds in a dict, and to nothing else."""

    def __init__(self) -> None:
        super().__init__(None)
        self.weights = {"w": self.w}

    def forward(self, x: T) -> T:
        return self.conv(x) * doubled(self.weights["w"])


@distributed(ranks=2, transports=("loopback",))
def test_functions_of_parameters_alone(P_world: Partition) -> None:
    alone = Indirect().double()
    net: Any = gpudist.distribute(copy.deepcopy(alone), P_world.grid(1, 1, 2, 1))
    wanted = gradients(alone, alone(images()))
    found = gradients(net, net(gpudist.scatter(images(), net.P_x)))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@distributed(ranks=2, transports=("loopback",))
def test_older_checkpoints_of_a_term_repeat_the_draws(P_world: Partition) -> None:
    """A checkpoint that returns a plain tensor calls the network again in backward."""
    net: Any = gpudist.distribute(nn.Dropout(0.5), P_world.grid(1, 1, 2, 1))
    terms: list[T] = []

    def term(block: T) -> T:
        terms.append(net(block).to_local())
        return terms[-1].sum()

    block = gpudist.scatter(images(), net.P_x).requires_grad_()
    checkpoint(term, block, use_reentrant=True).backward()
    first, again = terms
    assert torch.equal(first, again)
