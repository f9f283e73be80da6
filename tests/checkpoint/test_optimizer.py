"""The optimizer's state goes with the parameters it belongs to."""

from __future__ import annotations

import pytest
import torch

from gpudist.checkpoint import full_optimizer_state_dict, load_full_optimizer_state_dict
from gpudist.errors import CheckpointError
from gpudist.partition import Partition
from tests.checkpoint.models import (
    Layout,
    distributed_model,
    fill,
    fill_blocks,
    sequential_model,
)
from tests.checkpoint.optimizers import (
    MAKERS,
    Kind,
    assert_same_optimizer,
    new_optimizer,
    stepped,
)
from tests.pool import distributed


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
@distributed(ranks=5, transports=("loopback", "host", "nccl"))
def test_state_of_one_rank_fills_a_new_optimizer(P_world: Partition, layout: Layout) -> None:
    model, optimizer, expected = both(P_world, "adam", layout)
    given = expected.state_dict() if P_world.rank == 2 else None
    new = new_optimizer("adam", optimizer)
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
