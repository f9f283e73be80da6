"""Plans of layouts are priced like grids: messages are those of a step, memory and times follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpudist import ConversionError, Plan
from gpudist.errors import ShapeError
from gpudist.planning import plan, profile_of
from gpudist.planning.grids import representative_ranks
from gpudist.planning.rehearsal import DryNetwork
from gpudist.planning.table import choice, facts, time_rows, verdict
from gpudist.sbp import broadcast, split
from gpudist.world.partition import Partition
from tests.convert.test_layouts import PLANS, Skipping
from tests.planning.test_counts import counted_step
from tests.pool import distributed

SHAPE = (4, 2, 12, 8)


@pytest.mark.parametrize("case", PLANS)
@distributed(ranks=4, transports=("loopback",))
def test_messages_and_bytes_are_those_of_a_step_under_the_plan(
    P_world: Partition, case: str
) -> None:
    edits, grid = Plan(), (1, 1, 2, 2)
    PLANS[case](edits)
    torch.manual_seed(3)
    network = Skipping()
    counted = counted_step(P_world, network, SHAPE, grid, True, edits)
    stage = DryNetwork(network, SHAPE, replace(profile_of("h100"), wire="host"))
    rehearsed = stage.rehearse(grid, P_world.rank or 0, edits)
    phases = (rehearsed.forward, rehearsed.backward)
    assert counted == [(phase.messages, phase.message_bytes) for phase in phases]


def test_a_plan_is_one_more_row() -> None:
    edits, profile = Plan(), profile_of("a100")
    edits.layout("bottom", broadcast, at="input")
    advice = plan(Skipping(), SHAPE, 2, profile, best=1, plan=edits, grid=(1, 1, 2, 1))
    (planned,) = [one for one in advice if one.plan is not None]
    (plain,) = [one for one in advice if one.plan is None]
    assert choice(advice).startswith("Planned 1 of 4 partitions")
    assert planned.plan is edits and planned.grid == (1, 1, 2, 1)
    assert time_rows([planned])[0][0] == "plan on [1, 1, 2, 1]"
    assert "grid plan on [1, 1, 2, 1] needs" in verdict([planned], profile)
    assert facts(planned)["plan"]["layouts"][0]["path"] == "bottom"
    assert facts(plain)["plan"] is None


def test_copies_need_more_memory_and_operations() -> None:
    """Four workers that compute the whole bottom do four times its operations."""
    edits = Plan()
    edits.layout("bottom", broadcast, at="input")
    dry = DryNetwork(Skipping(), (1, 2, 64, 64), profile_of("a100"))
    plain, planned = dry.rehearse((1, 1, 4, 1), 1), dry.rehearse((1, 1, 4, 1), 1, edits)
    # Two calls of a convolution of four channels on 32 x 32 cells, of which a worker has a quarter.
    bottom = 2 * 2 * (4 * 4 * 9) * 32 * 32
    # Windows at the edges of blocks read ghosts, which the convolution does not compute.
    assert planned.forward.flops - plain.forward.flops == pytest.approx(bottom * 3 / 4, rel=0.02)
    assert planned.memory.activations > plain.memory.activations


def test_the_ranks_of_uneven_and_small_grids_are_rehearsed() -> None:
    edits = Plan()
    edits.layout("up", split(2, [1, 1, 9, 1]), grid=[4])
    edits.layout("bottom", [split(0), broadcast], at="input", grid=[2, 4])
    dry = DryNetwork(Skipping(), (2, 2, 16, 8), profile_of("a100"))
    assert representative_ranks(dry, (1, 1, 8, 1), edits) == [0, 2, 4, 6]


def test_plans_that_cannot_be_priced() -> None:
    edits = Plan()
    edits.layout("head", broadcast)
    with pytest.raises(ConversionError, match=r"no modules \['head'\]"):
        plan(Skipping(), SHAPE, 4, plan=edits, grid=(1, 1, 4, 1))
    with pytest.raises(ShapeError, match=r"\[1, 1, 3, 1\] of the plan does not split .* 4 ranks"):
        plan(Skipping(), SHAPE, 4, plan=Plan(), grid=(1, 1, 3, 1))
