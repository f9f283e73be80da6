"""The judge of plans notices gradients, buffers, seeds and skips that a plan would get wrong."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from gpudist import Plan
from gpudist.convert.converted import conversion_of
from gpudist.sbp import broadcast, call_cache, dispatch, split
from gpudist.sbp.pins import PlacedPin
from tests.hazards.entries import Entry, Input
from tests.hazards.judge import Verdict, judge
from tests.hazards.plans import Planned
from tests.hazards.subjects import Values

GRID = (1, 1, 2, 2)
WORKERS = 4


class Skip(nn.Module):
    """A skip around a stretch that a plan may compute in another layout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3, padding=1)
        self.bottom = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(x)
        return torch.tanh(self.bottom(y) + y)


def copies() -> Plan:
    plan = Plan()
    plan.layout("bottom", broadcast, at="input")
    return plan


def other_blocks() -> Plan:
    """Blocks of the same shape, which two workers exchange."""
    plan = Plan()
    plan.layout("bottom", [split(3), split(2)], grid=[2, 2])
    return plan


def verdict_on(plan: Plan, subject: type[Planned] = Planned, p: float = 0.0) -> Verdict:
    given = Input("x", ("2", "2", "8", "8"))
    entry = Entry("Skip", partial(Skip, p), (given,), {}, step=0, random=p > 0)
    of_plan: Any = partial(subject, plan)
    return judge(entry, GRID, of_plan)


@pytest.mark.parametrize("plan", [copies, other_blocks])
def test_plans_themselves_are_right(plan: Any) -> None:
    assert str(verdict_on(plan())) == "right"
    assert str(verdict_on(plan(), p=0.5)) == "right"


def test_gradients_counted_by_every_worker() -> None:
    moved = PlacedPin._move_tensor

    def counted(self: PlacedPin, x: Any) -> Any:
        y: Any = moved(self, x)
        if y._local.requires_grad:
            y._local.register_hook(lambda gradient: gradient * WORKERS)
        return y

    with patch.object(PlacedPin, "_move_tensor", counted):
        verdict = verdict_on(copies())
    assert verdict.how == "wrong" and "gradient of parameter down.weight" in verdict.text


class EveryUpdate(Planned):
    """Buffers get the update of each worker."""

    def call(self, values: Values) -> Any:
        before = {name: b.clone() for name, b in self.network.named_buffers()}
        found = super().call(values)
        for name, b in self.network.named_buffers():
            b.data.add_((WORKERS - 1) * (b - before[name]))
        return found


class OwnSeed(Planned):
    """Each worker draws by its own seed."""

    def distributed(self, network: nn.Module, said: Any) -> nn.Module:
        made = super().distributed(network, said)
        conversion = conversion_of(made)
        conversion.has_agreed, conversion.scope.seed = True, conversion.P_x.rank or 0
        return made


@pytest.mark.parametrize(
    ("subject", "p", "says"), [(EveryUpdate, 0.0, "buffer bottom.1."), (OwnSeed, 0.5, "output")]
)
def test_updates_and_seeds_of_every_worker(subject: type[Planned], p: float, says: str) -> None:
    verdict = verdict_on(copies(), subject, p)
    assert verdict.how == "wrong" and says in verdict.text, verdict


def test_skip_that_is_not_moved() -> None:
    def unmoved(movements: Any, local: list[torch.Tensor]) -> list[torch.Tensor]:
        return local

    with (
        patch.object(dispatch, "box_inputs", unmoved),
        patch.object(call_cache, "box_inputs", unmoved),
    ):
        verdict = verdict_on(other_blocks())
    assert verdict.how == "wrong" and "output: " in verdict.text, verdict
