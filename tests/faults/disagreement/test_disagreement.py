"""Every operator with every disagreement, on threads.

``python -m tests.faults.disagreement`` tries all transports.
"""

from __future__ import annotations

import pytest

from tests.faults.disagreement.acts import AGREED, KINDS, NAMES
from tests.faults.disagreement.run import Told, every_rank, shows_both, verdict
from tests.pool import the_pool

ODD = 1
# Over the others, one of each kind of message.
ELSEWHERE = ("halo_exchange", "all_sum_reduce")


@pytest.mark.parametrize("name", NAMES)
def test_every_disagreement_is_found_on_threads(name: str) -> None:
    for kind in KINDS:
        if (name, kind) not in AGREED:
            told = every_rank(the_pool, "loopback", name, kind, ODD)
            assert verdict(told, ODD) in ("detected", "refused"), f"{name}, another {kind}: {told}"


@pytest.mark.parametrize("transport", ["host", "gloo", "nccl"])
def test_disagreements_are_found_between_processes(transport: str) -> None:
    for name, kind in zip(ELSEWHERE, ("shape", "order"), strict=True):
        told = every_rank(the_pool, transport, name, kind, ODD)
        assert verdict(told, ODD) == "detected", f"{name}, another {kind}: {told}"


@pytest.mark.parametrize("name, kind", sorted(AGREED))
def test_what_is_no_disagreement_goes_on(name: str, kind: str) -> None:
    told = every_rank(the_pool, "loopback", name, kind, ODD)
    assert {each.kind for each in told} == {""}, told


def test_verdicts() -> None:
    both = Told("PlanMismatch", "rank 0 means a and rank 1 means b", 0.1)
    one = Told("PlanMismatch", "rank 0 means a", 0.1)
    assert verdict([both, both], 1) == "detected"
    assert verdict([both, one], 1).startswith("one view: rank 1")
    assert verdict([both, Told("", "", 0.1)], 1).startswith("silent: rank 1")
    late = Told("CollectiveTimeout", both.text, 9.0)
    assert verdict([late, late], 1) == "at the deadline"
    assert verdict([late, both], 1).startswith("other errors")
    assert not shows_both("rank 0 and rank 2", 1)
