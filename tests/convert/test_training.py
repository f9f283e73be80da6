"""Twenty steps of training: the losses and the weights of the network alone, to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from gpudist import distribute, sequential
from gpudist.nn import DistributedCrossEntropyLoss, DistributedMSELoss
from gpudist.partition import CartesianPartition, Partition
from tests.convert.networks import NETWORKS
from tests.nn.compare import grid, own_block, own_slices, random_like_all
from tests.pool import distributed

STEPS = 20
RELATIVE = 1e-8
Network = torch.nn.Module

# The shapes of input and target, the two splits, and the optimizer.
CASES: dict[str, tuple[Sequence[int], Sequence[int], dict[str, list[int]], Callable[..., Any]]] = {
    "unet": (
        (1, 1, 4, 8, 12),
        (1, 3, 4, 8, 12),
        {"2x2": [1, 1, 1, 2, 2], "3": [1, 1, 1, 3, 1]},
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    ),
    "resnet": (
        (4, 3, 35, 38),
        (4,),
        {"2x2": [1, 1, 2, 2], "3": [1, 1, 1, 3]},
        lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    ),
    "video": (
        (1, 2, 3, 5, 4),
        (1, 3, 6, 20, 16),
        {"2x2": [1, 1, 1, 2, 2], "3": [1, 1, 1, 3, 1]},
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    ),
}


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@pytest.mark.parametrize("name", CASES)
@distributed(ranks=[3, 4], transports=["host"], timeout_s=120)
def test_twenty_steps(P_world: Partition, name: str, replicate: bool) -> None:
    split = CASES[name][2]["2x2" if P_world.size == 4 else "3"]
    check(name, grid(P_world, split), STEPS, replicate)


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@distributed(ranks=4, transports=["loopback"], timeout_s=120)
def test_three_steps_on_threads(P_world: Partition, replicate: bool) -> None:
    check("video", grid(P_world, CASES["video"][2]["2x2"]), 3, replicate)


def check(name: str, P_x: CartesianPartition, steps: int, replicate: bool) -> None:
    *_, optimizer_of = CASES[name]
    losses, state = _trained_alone(name, steps)
    net: Any = distribute(_network(name), P_x, replicate_parameters=replicate)
    criterion_of = DistributedCrossEntropyLoss if name == "resnet" else DistributedMSELoss
    criterion, optimizer = criterion_of(net.P_y), optimizer_of(net.parameters())
    for step, (whole, target) in enumerate(_batches(name, steps)):
        block = own_block(whole, P_x, requires_grad=False)
        loss = criterion(net(block), _block_of(target, net.P_y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert abs(loss.item() - losses[step]) <= RELATIVE * abs(losses[step]), f"step {step}"
    assert abs(losses[-1] - losses[0]) > 1e-3, "nothing was learned"
    back = sequential(net)
    assert back is not None
    for key, found in back.state_dict().items():
        difference = (found - state[key]).abs().max()
        assert difference <= RELATIVE * state[key].abs().max(), key


@cache
def _trained_alone(name: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the weights at the end."""
    network = _network(name)
    optimizer = CASES[name][-1](network.parameters())
    criterion = torch.nn.CrossEntropyLoss() if name == "resnet" else torch.nn.MSELoss()
    losses: list[float] = []
    for whole, target in _batches(name, steps):
        loss = criterion(network(whole), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, network.state_dict()


def _network(name: str) -> Network:
    """The same on every rank."""
    torch.manual_seed(3)
    return NETWORKS[name][0]().double()


def _batches(name: str, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One of two batches a step, so that there is something to learn."""
    shape, target_shape, *_ = CASES[name]
    for step in range(steps):
        if name == "resnet":
            target = (torch.arange(4) + step) % 2
        else:
            target = random_like_all(target_shape, 50 + step % 2)
        yield random_like_all(shape, step % 2), target


def _block_of(target: torch.Tensor, P_y: CartesianPartition) -> torch.Tensor:
    if target.dim() == P_y.dim:
        return own_block(target, P_y, requires_grad=False)
    where = own_slices((*target.shape, 1), P_y)
    return target[where[0]] if where is not None else target[:0]
