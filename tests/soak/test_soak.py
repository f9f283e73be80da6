"""The long run, made short: everything it does, and that it notices what it is there for."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.soak import __main__ as command
from tests.soak import functions, layers, operators, worlds
from tests.soak.figures import Figure, growth, spread, worst, write
from tests.soak.samples import COUNTS, Sample, take

# Torch warns of tensors without cells, which some configurations have.
pytestmark = pytest.mark.filterwarnings("ignore")
SEED = 3


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run lowers in its own processes, threads of this one get back."""
    monkeypatch.setattr(operators.operator, "_REMEMBERED_OPERATORS", operators.REMEMBERED)


@distributed(4, transports=("host", "gloo", "nccl"))
def test_functions_are_what_the_oracle_says(P_world: Partition) -> None:
    met = Counter(
        functions.check(P_world, random.Random(f"{SEED}/{number}")).partition(" ")[0]
        for number in range(60)
    )
    assert len(met) == 10, met


def test_a_run_of_operators() -> None:
    cases = operators.accepted_layers(SEED, 2, 4)
    answers = run_distributed(operators.run, 4, 60, 0.0, SEED, cases, False)
    met = answers[0][1]
    assert met.total() >= 60 and met["plans"] and met["layers"]
    assert all(other == met for _, other in answers)
    for samples, _ in answers:
        assert samples[0].operators == 0 and samples[-1].operators == met.total()


@distributed(2, transports=("loopback",))
def test_a_wrong_number_is_noticed(P_world: Partition) -> None:
    call = functions.draw(random.Random(SEED), P_world)
    right = call.dense(call.inputs)[P_world.rank or 0]
    functions._assert_equal(call.name, right, right)
    for wrong in (right + 1, right.flatten(), right.to(torch.complex128)):
        with pytest.raises(AssertionError):
            functions._assert_equal(call.name, wrong, right)


@pytest.mark.parametrize("transport", ["host", "loopback"])
def test_worlds_made_and_closed(transport: str) -> None:
    first, *_, last = worlds.run(transport, 40, samples=2)
    for name in COUNTS:
        assert getattr(first, name) == getattr(last, name), name
    assert last.operators == 40


@distributed(2, transports=("loopback",))
def test_layers_made_and_dropped(P_world: Partition) -> None:
    samples, alive, most = layers.run(P_world, 20, SEED, samples=2)
    assert alive == 0 and most > 0 and samples[-1].operators == 20


@distributed(2, transports=("host",))
def test_a_sample_sees_what_is_held(P_world: Partition) -> None:
    made = P_world.wire._communicators
    own = (P_world.rank or 0,)
    made.pop(own, None)
    new = {own, tuple(range(2))} - set(made)
    before = take(P_world, 0)
    held = [os.open("/proc/self/status", os.O_RDONLY) for _ in range(3)]
    P_world.allgather_data([1])
    P_world.create_partition_inclusive(own).communicator  # noqa: B018
    after = take(P_world, 1)
    for descriptor in held:
        os.close(descriptor)
    assert after.descriptors >= before.descriptors + 3
    assert after.communicators == before.communicators + len(new)
    assert after.segments > 0 and after.resident_bytes > 10**7 and after.threads >= 1


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


def test_figures(tmp_path: Path) -> None:
    assert growth([5, 1, 1, 1, 2, 2, 2, 9]) == 5.5 - 3
    assert spread([3, 1, 2]) == 2
    assert worst(spread, [[1, 2], [1, 5]]) == 4
    with pytest.raises(ValueError, match="3 samples"):
        growth([1, 2, 3])
    assert not Figure("a", 2, "s", 2).is_over and Figure("a", 2.1, "s", 2).is_over
    assert not Figure("a", 99, "s").is_over
    write(tmp_path / "new" / "soak.json", {"torch": "2"}, [Figure("a", 1, "s", 2)])
    assert json.loads((tmp_path / "new" / "soak.json").read_text()) == {
        "environment": {"torch": "2"},
        "figures": [{"name": "a", "value": 1, "unit": "s", "limit": 2}],
    }
