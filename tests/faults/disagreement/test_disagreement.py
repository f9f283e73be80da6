"""Every operator with every disagreement, on threads.

``python -m tests.faults.disagreement`` tries all transports.
"""

from __future__ import annotations

import pytest

from tests.faults.disagreement.acts import AGREED, KINDS, NAMES
from tests.faults.disagreement.run import every_rank, verdict
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
