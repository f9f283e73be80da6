"""Random plans through the native core; ``python -m tests.native.stress`` runs more of them."""

from __future__ import annotations

import pytest

from gpudist.world.partition import Partition
from tests.native.stress import RANKS, carry_out_random
from tests.pool import distributed

PLANS = 300


@pytest.mark.one_in(2)
@distributed([2, RANKS], transports=("host",))
@pytest.mark.parametrize("seed", [0])
def test_random_plans_are_bitwise_those_of_plain_loops(P_world: Partition, seed: int) -> None:
    met = carry_out_random(P_world, seed, 0, PLANS // 2)
    assert met["groups"] == PLANS // 2
