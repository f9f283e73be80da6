"""Plain tensors that require grad beside global ones: one value, with its gradient on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist.errors import ConventionError, PartitionError, PlanMismatch
from gpudist.sbp import broadcast, partial_sum
from gpudist.world.partition import Partition
from tests.pool import distributed

T = torch.Tensor
Loss = Callable[[Any, T, T], T]


def drawn(seed: int, *shape: int) -> T:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


IMAGES = drawn(0, 2, 2, 6, 6)
# A number, one of each channel, one of each cell, and matrices.
ONE, CHANNELS, CELLS = drawn(1).abs() + 0.5, drawn(2, 2, 1, 1), drawn(3, 2, 2, 6, 6)


def penalty(net: nn.Module) -> Any:
    return 0.1 * sum(p.square().sum() for p in net.parameters())


def gradient_penalty(net: Any, y: T, w: T) -> T:
    loss = (y.square() * w).mean() + net.weight.square().sum() * w
    found = torch.autograd.grad(loss, [net.weight, w], create_graph=True)
    return loss + sum((g**3).sum() for g in found)


def assigned(net: Any, y: T, w: T) -> T:
    z = y * 1
    z[:, 0] = w[0]
    return z.square().mean()


def added_in_place(net: Any, y: T, w: T) -> T:
    loss = y.square().mean()
    loss += w * penalty(net)
    return loss


def as_global(net: Any, y: Any, w: T) -> T:
    value = w * penalty(net)
    if hasattr(y, "placement"):
        value = gpudist.to_global(value, y.placement, [broadcast] * y.placement.axes)
    return y.square().mean() + value


LOSSES: dict[str, tuple[T, Loss]] = {
    "penalty": (ONE, lambda net, y, w: y.square().mean() + penalty(net)),
    "penalty first": (ONE, lambda net, y, w: w * penalty(net) + y.square().mean()),
    "to_global": (ONE, as_global),
    "weights of losses": (ONE, lambda net, y, w: torch.exp(-w) * y.square().mean() + w),
    "temperature": (ONE, lambda net, y, w: F.log_softmax(y / w, 1).square().mean()),
    "minus global": (ONE, lambda net, y, w: (w - y).square().mean()),
    "exponent": (ONE, lambda net, y, w: (y.abs() + 1).pow(w).mean()),
    "base": (ONE, lambda net, y, w: (w**y).mean()),
    "bound": (ONE, lambda net, y, w: torch.clamp(y, min=w).mean()),
    "in place": (ONE, added_in_place),
    "double backward": (ONE, gradient_penalty),
    "channels": (CHANNELS, lambda net, y, w: (w * y).square().mean()),
    "channels in place": (CHANNELS, lambda net, y, w: (y * 1).mul_(w).add_(w).square().mean()),
    "where": (CHANNELS, lambda net, y, w: torch.where(y > 0, y, w).square().mean()),
    "maximum": (CHANNELS, lambda net, y, w: torch.maximum(w, y).square().mean()),
    "twice": (CHANNELS, lambda net, y, w: (y[:, 0] * w[0]).mean() + (y * w).square().mean()),
    "assigned": (CHANNELS, assigned),
    "another dtype": (CHANNELS, lambda net, y, w: (y * w.float()).square().mean()),
    "target": (CELLS, lambda net, y, w: F.mse_loss(y, w)),
    "target first": (CELLS, lambda net, y, w: F.mse_loss(input=w, target=y)),
    "targets": (CELLS, lambda net, y, w: F.binary_cross_entropy_with_logits(y, w.sigmoid())),
    "cat": (CELLS, lambda net, y, w: torch.cat([y, w], 2).square().mean()),
    "stack": (CELLS, lambda net, y, w: torch.stack([w, y]).std()),
    "addcmul": (CELLS, lambda net, y, w: torch.addcmul(y, w, y, value=2.0).square().mean()),
    "matmul": (drawn(4, 3, 6), lambda net, y, w: (w @ y).square().mean()),
    "linear": (drawn(5, 3, 6), lambda net, y, w: F.linear(y, w).square().mean()),
    "einsum": (
        drawn(6, 2, 3),
        lambda net, y, w: torch.einsum("bchw,cd->bdhw", y, w).square().mean(),
    ),
    "conv": (drawn(7, 3, 2, 1, 1), lambda net, y, w: F.conv2d(y, w).square().mean()),
    "tied": (ONE, lambda net, y, w: F.conv2d(y, net.weight, padding=1).square().mean()),
}  # fmt: skip


def network() -> Any:
    net: Any = nn.Conv2d(2, 2, 3, padding=1).double()
    with torch.no_grad():
        net.weight.copy_(drawn(8, 2, 2, 3, 3) / 3)
        net.bias.copy_(drawn(9, 2))
    return net


def trained(net: Any, y: T, start: T, loss: Loss) -> list[T | None]:
    w = start.clone().requires_grad_()
    net.zero_grad()
    value: Any = loss(net, y, w)
    value.backward()
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return [whole.detach(), w.grad, *[p.grad for p in net.parameters()]]


@distributed(ranks=4, transports=("loopback",))
def test_plain_tensors_get_their_full_gradient(P_world: Partition) -> None:
    """Every rank has the gradients of the sequential program."""
    P_x = P_world.grid(2, 1, 2, 1)
    net: Any = gpudist.distribute(network(), P_x)
    block = gpudist.scatter(IMAGES, P_x)
    failures: list[str] = []
    for name, (start, loss) in LOSSES.items():
        alone = network()
        wanted = trained(alone, alone(IMAGES), start, loss)
        found = trained(net, net(block), start, loss)
        for a, b in zip(found, wanted, strict=True):
            if a is not b if a is None or b is None else not torch.allclose(a, b, atol=1e-9):
                failures.append(f"{name}: {a}, expected {b}")
    assert not failures, "\n".join(failures)


@distributed(ranks=2, transports=("loopback",))
def test_a_weight_with_an_optimizer_of_its_own(P_world: Partition) -> None:
    """Learned weights and the network's parameters stay equal on all workers."""
    P_x = P_world.grid(2, 1, 1, 1)
    ends: list[list[T]] = []
    for is_global in (False, True):
        net: Any = network()
        if is_global:
            net = gpudist.distribute(net, P_x)
        w = ONE.clone().requires_grad_()
        own, others = torch.optim.Adam([w], 0.1), torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            y = net(gpudist.scatter(IMAGES, P_x) if is_global else IMAGES)
            loss = torch.exp(-w) * y.square().mean() + w + penalty(net)
            own.zero_grad()
            others.zero_grad()
            loss.backward()
            own.step()
            others.step()
        ends.append([w.detach(), net.weight.detach()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(b, a)


@distributed(ranks=2, transports=("loopback",))
def test_what_is_not_one_value_raises(P_world: Partition) -> None:
    """Errors say what to do, and doing it gives the gradient."""
    P_x = P_world.grid(2, 1, 1, 1)
    net: Any = gpudist.distribute(network(), P_x)
    block = gpudist.scatter(IMAGES, P_x)
    y = net(block)
    loss, w = y.square().mean(), ONE.clone().requires_grad_()
    term = y.to_local().square().sum()
    with pytest.raises(PlanMismatch, match=r"add: .* equal on all workers, but they have \n  rank"):
        torch.add(loss, term)
    with pytest.raises(ConventionError, match="comes from to_local, whose gradients add up"):
        torch.add(loss, y.full_tensor().square().sum())
    with pytest.raises(ConventionError, match="make both global by themselves"):
        gpudist.to_global(w * y.full_tensor(), y.placement, [broadcast] * y.placement.axes)
    for total in (w * 1, torch.zeros((), dtype=torch.float64)):
        with pytest.raises(PartitionError, match=r"changed in place .* total = total"):
            total += loss
    with pytest.raises(gpudist.ShapeError, match="plain tensor"):
        torch.mul(y, block)
    total = torch.zeros((), dtype=torch.float64)
    total += loss.detach()
    assert total == loss.full_tensor()
    terms = gpudist.to_global(term, y.placement, [partial_sum] * y.placement.axes)
    (loss + terms).backward()
    alone = network()
    z = alone(IMAGES)
    (z.square().mean() + z.square().sum()).backward()
    torch.testing.assert_close(net.weight.grad, alone.weight.grad)


@distributed(ranks=2, transports=("loopback",))
def test_copies_of_copies_keep_their_gradient(P_world: Partition) -> None:
    """A copy of another global tensor may become a global tensor again: gradients add up."""
    P_x = P_world.grid(2, 1, 1, 1)
    net: Any = gpudist.distribute(network(), P_x)
    y = net(gpudist.scatter(IMAGES, P_x))
    copies = [broadcast] * y.placement.axes
    again = gpudist.to_global(y.full_tensor().exp(), y.placement, copies)
    (again.mean() + y.full_tensor(grad_sbp=copies).mean()).backward()
    alone = network()
    z = alone(IMAGES)
    (z.exp().mean() + z.mean()).backward()
    torch.testing.assert_close(net.weight.grad, alone.weight.grad)


@pytest.mark.parametrize("kind", ["owned", "split"])
@distributed(ranks=2, transports=("loopback",))
def test_penalties_on_parameters_that_are_global(P_world: Partition, kind: str) -> None:
    """Penalties on parameters that no worker holds whole are global numbers."""
    alone: Any = nn.Sequential(nn.Linear(4, 4).double())
    with torch.no_grad():
        alone[0].weight.copy_(drawn(10, 4, 4))
    x, plan = drawn(11, 4, 4), gpudist.Plan()
    if kind == "split":
        plan.split_weight("0", (1, 2, 1))
    options: dict[str, Any] = {
        "replicate_parameters": kind != "owned", "broadcast_parameters": True,
    }  # fmt: skip
    net: Any = gpudist.distribute(copy.deepcopy(alone), P_world.grid(2, 1), plan, **options)
    y = net(gpudist.scatter(x, net.P_x))
    (y.square().mean() + net[0].weight.square().sum()).backward()
    (alone(x).square().mean() + alone[0].weight.square().sum()).backward()
    torch.testing.assert_close(net[0].weight.grad.full_tensor(), alone[0].weight.grad)
