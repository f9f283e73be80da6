"""Random networks have the sequential gradients, or are refused if they mix conventions."""

from __future__ import annotations

import pytest

from gpudist.world.partition import Partition
from tests.nn.tensor_parallel.parallel_network_cases import draw, outcome
from tests.pool import distributed


@pytest.mark.parametrize("seed", range(20))
@distributed(ranks=[2, 3], transports=["loopback"])
def test_right_or_refused(P_world: Partition, seed: int) -> None:
    case = draw(seed, P_world.size)
    found = outcome(case, P_world)
    assert found == "right" if case.is_uniform else found in ("right", "refused"), case


def test_cases_are_of_both_kinds() -> None:
    cases = [draw(seed, workers) for seed in range(20) for workers in (2, 3)]
    uniform = [case for case in cases if case.is_uniform]
    assert {(case.convention, case.is_split) for case in uniform} == {
        ("dual", False), ("dual", True), ("invariant", False), ("invariant", True),
    }  # fmt: skip
    assert len(uniform) >= 15 and len(cases) - len(uniform) >= 10
    assert {case.head for case in uniform} == {"none", "plain", "columns", "gathered"}
