"""Operators on a current stream that executes later, over the doubles of CUDA and NCCL."""

from __future__ import annotations

import pytest
import torch

from gpudist.transport.base import Transport
from gpudist.world import runtime
from tests.doubles.asynchronous import Asynchronous
from tests.doubles.nccl import clear, inject, violations
from tests.transport.nccl_actions import ACTIONS
from tests.transport.worlds import results

RANKS = 3


def act(transport: Transport, name: str) -> list[str]:
    """Cells that reach the stream early and are read late are the same."""
    P_world, action = runtime.world_of(transport), ACTIONS[name]
    clear()
    expected = action(P_world)
    if transport.rank == 1:
        inject("delay", after=1)
    with Asynchronous():
        found = [action(P_world) for _ in range(4)]
        assert all(torch.equal(y, expected) for y in found)
    return violations()


# Under a dispatch mode, norms run as compositions.
@pytest.mark.parametrize("name", [name for name in ACTIONS if name != "norm"])
def test_operators_wait_for_nothing_and_nobody_reads_too_early(name: str) -> None:
    ranks = RANKS + 1 if name == "triples" else RANKS
    assert results("nccl", ranks, act, name) == [[]] * ranks
