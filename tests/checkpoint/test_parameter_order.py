"""State of optimizers is matched by parameter name, in any order of parameters.

Parameters of a kind have equal shapes here, so that a mix-up is not refused for its shape.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.checkpoint import (
    full_optimizer_state_dict,
    load,
    load_full_optimizer_state_dict,
    save,
)
from gpudist.errors import CheckpointError
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import Partition
from tests.checkpoint.models import fill
from tests.checkpoint.optimizers import assert_same_optimizer
from tests.pool import distributed


class Scale(nn.Module):
    """Two parameters, of which the forward uses the second first."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.factor = (nn.Parameter(torch.ones(3, 1, 1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.shift


class Level(nn.Module):
    """A level of a U-Net, made from the outside in as MONAI does, and run in another order."""

    def __init__(self, below: nn.Module) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.up = Scale()
        self.below = below
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.down = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = nn.functional.max_pool2d(self.down(x), 3, 1, 1)
        return self.up(self.below(self.norm(down)) * self.scale + x)


GROUPS: dict[str, Callable[[list[str]], list[list[str]]]] = {
    "one group": lambda names: [names],
    "three groups": lambda names: [
        [n for n in names if "below.below" in n],
        [n for n in names if "below.below" not in n and "shift" in n],
        [n for n in names if "below.below" not in n and "shift" not in n],
    ],
}


def network() -> nn.Module:
    net = Level(Level(Level(nn.Identity())))
    fill(net)
    return net


def optimizer_of(net: nn.Module, groups: str, named: bool) -> torch.optim.Optimizer:
    """Adam of the parameters in the order in which the network lists them."""
    parameters = dict(net.named_parameters())
    made: list[Any] = [
        {"params": [(n, parameters[n]) if named else parameters[n] for n in names], "lr": 0.1 + i}
        for i, names in enumerate(GROUPS[groups](list(parameters)))
    ]
    return torch.optim.Adam(made, amsgrad=True)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Steps by gradients that are other ones for each name, and the same in every layout."""
    placed = placements(net)
    for number in range(steps):
        for name, parameter in net.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()) + number)
            shape = placed[name].shape if name in placed else parameter.shape
            gradient = torch.randn(shape, generator=generator)
            box = placed[name].own_box if name in placed else None
            parameter.grad = gradient if box is None else gradient[box.slices].clone()
        optimizer.step()


def both(P_world: Partition, groups: str, named: bool) -> tuple[nn.Module, Any, Any]:
    """Return converted and sequential network and optimizers after the same steps."""
    sequential = network()
    P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size, 1])
    net = gpudist.distribute(copy.deepcopy(sequential), P_x)
    optimizers = optimizer_of(net, groups, named), optimizer_of(sequential, groups, named)
    for module, optimizer in zip((net, sequential), optimizers, strict=True):
        step(module, optimizer)
    return net, *optimizers


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("groups", list(GROUPS))
@distributed(ranks=2)
def test_state_of_a_converted_network_is_the_sequential_one_and_back(
    P_world: Partition, groups: str, named: bool
) -> None:
    net, optimizer, expected = both(P_world, groups, named)
    full = full_optimizer_state_dict(net, optimizer, to_all=True)
    assert_same_optimizer(full, expected.state_dict())
    new = optimizer_of(net, groups, named)
    load_full_optimizer_state_dict(net, new, expected.state_dict())
    assert_same_optimizer(new.state_dict(), optimizer.state_dict())


def shuffled(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer whose groups list the same parameters in another order."""
    given = copy.deepcopy(state_dict)
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    old = iter(numbers)
    state: dict[int, Any] = {}
    for group in given["param_groups"]:
        pairs = list(zip(group["param_names"], group["params"], strict=True))
        random.Random(3).shuffle(pairs)
        group["param_names"] = [name for name, _ in pairs]
        group["params"] = [next(old) for _ in pairs]
        state |= {
            new: given["state"][number]
            for new, (_, number) in zip(group["params"], pairs, strict=True)
        }
    return {"state": state, "param_groups": given["param_groups"]}


@pytest.mark.parametrize("named", [False, True])
@distributed(ranks=2)
def test_names_in_the_state_dict_go_before_its_order(P_world: Partition, named: bool) -> None:
    """Names decide, also for an optimizer that has no names and gets none."""
    net, _, expected = both(P_world, "three groups", True)
    new, kept = (optimizer_of(net, "three groups", named) for _ in range(2))
    step(net, kept)
    given = shuffled(expected.state_dict())
    load_full_optimizer_state_dict(net, new, given if P_world.rank == 1 else None, root=1)
    assert_same_optimizer(new.state_dict(), kept.state_dict())


@distributed(ranks=2, transports=("loopback", "host"))
def test_names_as_the_optimizer_was_made_with(P_world: Partition) -> None:
    """Names of the parameters within the network's part, in another order than the state dict's."""
    net, optimizer, expected = both(P_world, "one group", True)
    given = shuffled(expected.state_dict())
    (own,), (other,) = optimizer.param_groups, given["param_groups"]
    for group in (own, other):
        group["param_names"] = [f"part.{name}" for name in group["param_names"]]
    kept = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    load_full_optimizer_state_dict(net, optimizer, given)
    assert_same_optimizer(optimizer.state_dict(), kept)


@distributed(ranks=2, transports=("loopback", "host", "gloo"))
def test_other_names_are_refused_on_every_rank(P_world: Partition) -> None:
    net, optimizer, expected = both(P_world, "three groups", True)
    before, given = copy.deepcopy(optimizer.state_dict()), expected.state_dict()
    given["param_groups"][1]["param_names"][0] = "other.shift"
    words = (
        r"rank 0: its group 1 names the parameters \['other.shift'\], which the optimizer's group "
        r"does not have, and lacks \['up.shift'\]; create both"
    )
    with pytest.raises(CheckpointError, match=words):
        load_full_optimizer_state_dict(net, optimizer, given if P_world.rank == 0 else None)
    assert_same_optimizer(optimizer.state_dict(), before)


@pytest.mark.parametrize("named", [False, True])
@distributed(ranks=2)
def test_checkpoint_goes_by_name(P_world: Partition, tmp_path: Path, named: bool) -> None:
    """State is matched by name if the optimizer lists the parameters in reverse."""
    net, optimizer, _ = both(P_world, "three groups", named)
    save(net, tmp_path / "checkpoint", optimizer)
    new = optimizer_of(net, "three groups", named)
    for group in new.param_groups:
        group["params"].reverse()
        if named:
            group["param_names"].reverse()
    load(net, tmp_path / "checkpoint", new)
    for group, other in zip(new.param_groups, optimizer.param_groups, strict=True):
        assert group["params"] == other["params"][::-1] and group["lr"] == other["lr"]
        assert group.get("param_names") == (other["param_names"][::-1] if named else None)
        for parameter in group["params"]:
            assert_same_optimizer(new.state[parameter], optimizer.state[parameter])
