"""A shortened long run: everything it does, and that it detects each kind of failure."""

from __future__ import annotations

import random

import pytest
import torch

from gpudist import ops
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.faults import random_calls
from tests.faults.operators import OPERATORS
from tests.faults.soak import __main__ as command, layers, mixture, worlds
from tests.faults.soak.samples import COUNTS, Sample
from tests.pool import distributed

# Torch warns of tensors without cells, which some configurations have.
pytestmark = pytest.mark.filterwarnings("ignore")
SEED = 3


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore in this process's threads what the run lowers in its own processes."""
    monkeypatch.setattr(mixture.operator, "_REMEMBERED_OPERATORS", mixture.REMEMBERED)


@distributed(4, transports=("host", "gloo", "nccl"))
def test_functions_are_what_the_oracle_says(P_world: Partition) -> None:
    for name, row in OPERATORS.items():
        for number in range(3):
            if row.draw is None:
                continue
            rng = random.Random(f"{SEED}/{name}/{number}")
            random_calls.check(P_world, rng, row.draw(rng, P_world))


def test_a_run_of_operators() -> None:
    cases = mixture.accepted_layers(SEED, 2, 4)
    answers = run_distributed(mixture.run, 4, 60, 0.0, SEED, cases, False)
    met = answers[0][1]
    assert met.total() >= 60 and met["plans"] and met["layers"]
    assert all(other == met for _, other in answers)
    for samples, _ in answers:
        assert samples[0].operators == 0 and samples[-1].operators == met.total()


@pytest.mark.parametrize("transport", ["host", "loopback"])
def test_worlds_made_and_closed(transport: str) -> None:
    first, *_, last = worlds.run(transport, 40, samples=2)
    for name in COUNTS:
        assert getattr(first, name) == getattr(last, name), name
    assert last.operators == 40


@distributed(2, transports=("loopback",))
def test_layers_made_and_dropped(P_world: Partition) -> None:
    held = ops.HaloExchange(P_world.create_cartesian_topology_partition([2]), halo=[(1, 1)])
    held(torch.ones(3))
    samples, alive, most = layers.run(P_world, 20, SEED, samples=2)
    assert alive == 0 and most > 0 and samples[-1].operators == 20


def _samples(**changes: list[int]) -> list[Sample]:
    count = len(next(iter(changes.values())))
    names = [name for name in Sample.__annotations__ if name not in changes]
    return [
        Sample(**{name: 1 for name in names}, **{name: of[i] for name, of in changes.items()})
        for i in range(count)
    ]


def test_what_grows_after_the_warm_up_is_over_its_limit() -> None:
    mib = 2**20
    steady = _samples(resident_bytes=[1, 50, 90, 100] + [100 * mib, 101 * mib] * 4)
    leaking = _samples(resident_bytes=[100 * mib + 9 * mib * i for i in range(12)])
    keeping = _samples(python_blocks=[1000 + 5 * i for i in range(12)])
    one_more = _samples(descriptors=[5] * 11 + [6])
    assert not any(figure.is_over for figure in command.leak_figures("x", [steady, steady]))
    cases = ((leaking, "resident"), (keeping, "by Python"), (one_more, "descriptors"))
    for samples, name in cases:
        over = [each.name for each in command.leak_figures("x", [steady, samples]) if each.is_over]
        assert len(over) == 1 and name in over[0], over
