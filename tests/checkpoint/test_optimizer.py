"""The optimizer's state goes with the parameters it belongs to."""

from __future__ import annotations

import copy
import functools
import operator
import re
from typing import Any

import pytest
import torch

from gpudist.checkpoint import full_optimizer_state_dict, load_full_optimizer_state_dict
from gpudist.errors import CheckpointError
from gpudist.world.partition import Partition
from tests.checkpoint.models import (
    Layout,
    both as both_models,
    distributed_model,
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
    model, sequential = both_models(P_world, 4, layout)
    expected = stepped(kind, sequential, sequential)
    return model, stepped(kind, model, sequential), expected


@pytest.mark.parametrize("layout", ["features", "channels"])
@pytest.mark.parametrize("kind", list(MAKERS))
@distributed(ranks=5, transports=("loopback", "host"))
def test_full_state_is_the_sequential_one(P_world: Partition, kind: Kind, layout: Layout) -> None:
    model, optimizer, expected = both(P_world, kind, layout)
    for to_all in (False, True):
        full = full_optimizer_state_dict(model, optimizer, to_all=to_all)
        wanted = expected.state_dict() if to_all or P_world.rank == 0 else {}
        assert_same_optimizer(full, wanted)


@pytest.mark.parametrize("layout", ["features", "channels"])
@distributed(ranks=5, transports=("loopback", "host", "nccl"))
def test_state_of_one_rank_fills_a_new_optimizer(P_world: Partition, layout: Layout) -> None:
    model, optimizer, expected = both(P_world, "adam", layout)
    given = expected.state_dict() if P_world.rank == 2 else None
    new = new_optimizer("adam", optimizer)
    load_full_optimizer_state_dict(model, new, given, root=2)
    assert_same_optimizer(new.state_dict(), optimizer.state_dict())


MISFITS: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "shape": (
        ("state", 0, "exp_avg"), torch.zeros(5, 3, 4), "exp_avg of 0.weight has shape [5, 3, 4]"
    ),
    "value": (("state", 0, "step"), ..., "step of 0.weight is a <class 'ellipsis'>; it must be"),
    "parameter": (("state", 99), {}, "it has state of parameters [99] but there are 12"),
    "groups": (
        ("param_groups",), [{"params": [0, 1]}], "its groups have [2] parameters, those of the"
    ),
    "option": (
        ("param_groups", 1, "lr"), torch.ones(2), "param_groups[1]['lr'] is a tensor of shape [2]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("misfit", list(MISFITS))
@distributed(ranks=5, transports=("loopback",))
def test_misfit_is_refused_on_every_rank(P_world: Partition, misfit: str) -> None:
    (*path, last), value, words = MISFITS[misfit]
    model, optimizer, expected = both(P_world, "adam", "channels")
    before = copy.deepcopy(optimizer.state_dict())
    given: Any = expected.state_dict()
    functools.reduce(operator.getitem, path, given)[last] = value
    with pytest.raises(CheckpointError, match=f"does not fit the optimizer.*{re.escape(words)}"):
        load_full_optimizer_state_dict(model, optimizer, given if P_world.rank == 0 else None)
    assert_same_optimizer(optimizer.state_dict(), before)


class HalfWay(torch.optim.SGD):
    """Its own way of loading writes to what there is, and then fails."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = 9.0
        self.param_groups.append({"params": []})
        self.state[self.param_groups[0]["params"][0]]["more"] = 1
        raise ValueError("half way")


@distributed(ranks=5, transports=("loopback", "host"))
def test_optimizer_that_loads_in_its_own_way_is_as_it_was(P_world: Partition) -> None:
    model, optimizer, expected = both(P_world, "sgd", "features")
    new = HalfWay([{"params": g["params"]} for g in optimizer.param_groups], lr=0.5, momentum=0.9)
    torch.optim.SGD.load_state_dict(new, optimizer.state_dict())
    before = copy.deepcopy(new.state_dict())
    with pytest.raises(CheckpointError, match="does not take the state: ValueError: half way"):
        load_full_optimizer_state_dict(model, new, expected.state_dict())
    assert_same_optimizer(new.state_dict(), before)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "rank 1: the root passed None as state_dict, not a dict; only the other ranks may "),
        ("adam.pt", "rank 1: the root passed 'adam.pt'"),
        # full_optimizer_state_dict returns this on ranks other than 0.
        ({}, "rank 1: KeyError: 'param_groups'"),
    ],
)
@distributed(ranks=3, transports=("loopback", "host"))
def test_root_without_state_is_refused_on_every_rank(
    P_world: Partition, given: Any, words: str
) -> None:
    model = distributed_model(P_world, 2, "features")
    optimizer = MAKERS["sgd"](model.parameters())
    with pytest.raises(CheckpointError, match=words):
        load_full_optimizer_state_dict(model, optimizer, given, root=1)


@distributed(ranks=3, transports=("host",))
def test_dtype_that_one_rank_does_not_know_is_refused_on_every_rank(P_world: Partition) -> None:
    """Ranks 1 and 2 have the model and its state; rank 0 has another torch."""
    model, sequential = distributed_model(P_world, 2, "features"), sequential_model()
    optimizer, given = MAKERS["sgd"](model.parameters()), MAKERS["sgd"](sequential.parameters())
    for module, of_module in ((model, optimizer), (sequential, given)):
        for parameter in module.parameters() if P_world.rank != 0 else ():
            of_module.state[parameter]["odd"] = torch.zeros_like(parameter, dtype=torch.int16)
    words = f"rank 0: torch {re.escape(torch.__version__)} has no dtype 'int16'"
    before = dict(optimizer.state)
    with pytest.MonkeyPatch.context() as patch:
        if P_world.rank == 0:
            patch.delattr(torch, "int16")
        with pytest.raises(CheckpointError, match=words):
            full_optimizer_state_dict(model, optimizer)
        with pytest.raises(CheckpointError, match=words):
            load_full_optimizer_state_dict(model, optimizer, given.state_dict(), root=2)
    assert dict(optimizer.state) == before


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (torch.zeros(3, 3, 3), r"odd of 2.weight has shape \[3, 3, 3\], the parameter \[5\]; only"),
        (..., "odd of 2.weight is a <class 'ellipsis'>; it must be a number, a text or a list of"),
        ([torch.zeros(3)], r"odd of 2.weight\[0\] is a tensor of shape \[3\]; it must be a number"),
    ],
)
@distributed(ranks=5, transports=("loopback",))
def test_state_without_a_sequential_counterpart_is_refused(
    P_world: Partition, state: Any, words: str
) -> None:
    model, optimizer, _ = both(P_world, "adam", "features")
    for parameter in model.parameters():
        optimizer.state[parameter]["odd"] = state
    with pytest.raises(CheckpointError, match=words):
        full_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("strange_on", [[0, 1, 2], [2]])
@distributed(ranks=3, transports=("loopback", "host"))
def test_strange_parameters_are_refused_on_every_rank(
    P_world: Partition, strange_on: list[int]
) -> None:
    model = distributed_model(P_world, 2, "features")
    strange = [torch.nn.Parameter(torch.ones(2))] if P_world.rank in strange_on else []
    optimizer = MAKERS["sgd"]([*model.parameters(), *strange])
    words = f"rank {strange_on[0]}: the optimizer has parameters that do not belong to the module"
    with pytest.raises(CheckpointError, match=words):
        full_optimizer_state_dict(model, optimizer)
    with pytest.raises(CheckpointError, match=words):
        load_full_optimizer_state_dict(model, optimizer, None)
