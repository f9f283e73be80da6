"""Modules that a plan recomputes: gradients stay, kept bytes fall, the network is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from examples.networks import UNet3d
from gpudist import ConversionError, Plan
from gpudist.planning import recompute
from gpudist.planning.rehearsal import KeptForBackward
from gpudist.world.partition import Partition
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid
from tests.pool import distributed

SHAPE = (1, 1, 8, 8, 8)


def network() -> UNet3d:
    torch.manual_seed(1)
    return UNet3d(1, 2, 4, 2).double()


def edit(plan: Plan) -> None:
    for path in ("down.0", "down.1", "up.0"):
        plan.recompute(path)


def kept_bytes(made: nn.Module, x: torch.Tensor) -> int:
    kept = KeptForBackward(list(made.parameters()))
    with kept:
        made(x)
    return kept.nbytes


@distributed(ranks=2, transports=["loopback"])
def test_recomputed_blocks_keep_their_inputs_alone(P_world: Partition) -> None:
    P_x, plan = grid(P_world, [1, 1, 2, 1, 1]), Plan()
    edit(plan)
    assert_as_alone(network, P_x, [SHAPE], edit)
    alone = network()
    x = torch.full((1, 1, 4, 8, 8), 1.0 + (P_world.rank or 0), dtype=torch.float64)
    made = gpudist.distribute(copy.deepcopy(alone), P_x, plan)
    assert kept_bytes(made, x) < 0.5 * kept_bytes(gpudist.distribute(copy.deepcopy(alone), P_x), x)
    # Blocks that the network recomputes itself are not recomputed twice.
    by_hand = gpudist.distribute(recompute(network()), P_x, plan)
    assert kept_bytes(by_hand, x) == kept_bytes(made, x)
    kinds = [type(module) for module in alone.modules()]
    reverted: Any = gpudist.sequential(made)
    assert [type(module) for module in reverted.modules()] == kinds


def test_a_plan_names_what_it_recomputes() -> None:
    plan = Plan()
    edit(plan)
    assert Plan.from_text(plan.to_text()) == plan
    assert str(plan) == "recomputed in backward: down.0, down.1, up.0"
    plan.recompute("left")
    with pytest.raises(ConversionError, match=r"no modules \['left'\]"):
        gpudist.plan_of(network(), [1, 1, 2, 1, 1], SHAPE, plan=plan)
