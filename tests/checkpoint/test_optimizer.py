"""The optimizer's state goes with the parameters it belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.checkpoint import full_optimizer_state_dict, load_full_optimizer_state_dict
from gpudist.errors import CheckpointError
from gpudist.nn.placement import placements
from gpudist.partition import Partition
from tests.checkpoint.models import (
    Layout,
    distributed_model,
    fill,
    fill_blocks,
    sequential_model,
)
from tests.pool import distributed

Kind = str
MAKERS: dict[Kind, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def stepped(kind: Kind, model: torch.nn.Module, whole: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer after two steps, by the same random gradients in every layout."""
    halves = list(model.children())
    groups = [{"params": [*halves[0].parameters()]}, {"params": [*model[1:].parameters()]}]  # pyright: ignore
    optimizer = MAKERS[kind](groups)
    optimizer.param_groups[1]["lr"] = 0.3
    placed = placements(model)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        shapes = {name: p.shape for name, p in whole.named_parameters()}
        for name, parameter in model.named_parameters():
            gradient = torch.randn(shapes[name], generator=generator)
            if name in placed:
                box = placed[name].own_box
                gradient = gradient[box.slices] if box is not None else torch.empty(0)
            parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer


def both(
    P_world: Partition, kind: Kind, layout: Layout
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A distributed model, its optimizer, and that of the sequential model after the same steps."""
    sequential = sequential_model()
    fill(sequential)
    model = distributed_model(P_world, 4, layout)
    fill_blocks(model, sequential)
    expected = stepped(kind, sequential, sequential)
    return model, stepped(kind, model, sequential), expected


def assert_same_optimizer(actual: Any, expected: Any, what: str = "state") -> None:
    assert type(actual) is type(expected), what
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), what
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_same_optimizer(actual[key], value, f"{what}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), what
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_optimizer(one, other, f"{what}.{i}")
    else:
        assert actual == expected, what


@pytest.mark.parametrize("layout", ["features", "channels"])
@pytest.mark.parametrize("kind", list(MAKERS))
@distributed(ranks=5, transports=("loopback", "host"))
def test_full_state_is_the_sequential_one(P_world: Partition, kind: Kind, layout: Layout) -> None:
    model, optimizer, expected = both(P_world, kind, layout)
    full = full_optimizer_state_dict(model, optimizer)
    if P_world.rank == 0:
        assert_same_optimizer(full, expected.state_dict())
    else:
        assert full == {}


@pytest.mark.parametrize("layout", ["features", "channels"])
@distributed(ranks=5, transports=("loopback", "host"))
def test_state_of_one_rank_fills_a_new_optimizer(P_world: Partition, layout: Layout) -> None:
    model, optimizer, expected = both(P_world, "adam", layout)
    given = expected.state_dict() if P_world.rank == 2 else None
    new = MAKERS["adam"]([{"params": g["params"]} for g in optimizer.param_groups])
    load_full_optimizer_state_dict(model, new, given, root=2)
    assert_same_optimizer(new.state_dict(), optimizer.state_dict())


@distributed(ranks=5, transports=("loopback",))
def test_every_rank_can_have_it(P_world: Partition) -> None:
    model, optimizer, expected = both(P_world, "adam", "channels")
    full = full_optimizer_state_dict(model, optimizer, to_all=True)
    assert_same_optimizer(full, expected.state_dict())


@distributed(ranks=5, transports=("loopback",))
def test_misfit_is_refused_on_every_rank(P_world: Partition) -> None:
    model, optimizer, expected = both(P_world, "adam", "channels")
    before = optimizer.state_dict()
    given = expected.state_dict()
    given["state"][0]["exp_avg"] = torch.zeros(5, 3, 4)
    with pytest.raises(CheckpointError, match=r"exp_avg of 0.weight has shape \[5, 3, 4\]"):
        load_full_optimizer_state_dict(model, optimizer, given if P_world.rank == 0 else None)
    alone = MAKERS["adam"](sequential_model().parameters()).state_dict()
    with pytest.raises(CheckpointError, match="groups"):
        load_full_optimizer_state_dict(model, optimizer, alone if P_world.rank == 0 else None)
    assert_same_optimizer(optimizer.state_dict(), before)


@distributed(ranks=5, transports=("loopback",))
def test_state_without_a_sequential_counterpart_is_refused(P_world: Partition) -> None:
    model, optimizer, _ = both(P_world, "adam", "features")
    for parameter in model.parameters():
        optimizer.state[parameter]["rows"] = torch.zeros(parameter.numel() + 3)
    with pytest.raises(CheckpointError, match="keeps rows of shape"):
        full_optimizer_state_dict(model, optimizer)
