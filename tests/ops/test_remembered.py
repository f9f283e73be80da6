"""Functions cache the operators they make, but not for ever if their arguments change."""

from __future__ import annotations

import pytest
import torch

from gpudist import all_sum_reduce, broadcast, send_recv
from gpudist.cache import Cache
from gpudist.ops import operator
from gpudist.sbp import Placement, boxing, to_global
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, operations, partition_of
from tests.pool import distributed
from tests.sbp.parts import B, S

LIMIT = 8


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_REMEMBERED_OPERATORS", LIMIT)


def _sum(P_world: Partition, n: int) -> None:
    P_line = P_world.create_cartesian_topology_partition([P_world.size])
    y = all_sum_reduce(torch.ones(n), P_line, [0], global_shape=[n])
    assert_same(y, torch.full((n,), float(P_world.size)))


@pytest.mark.usefixtures("few")
@distributed(3, transports=("loopback",))
def test_functions_whose_arguments_change_are_forgotten(P_world: Partition) -> None:
    counts: list[int] = []
    for n in range(1, 4 * LIMIT):
        _sum(P_world, n)
        counts.append(len(P_world.wire.remembered))
    assert max(counts) == counts[-1] == counts[LIMIT] <= LIMIT + 1
    # Those that were not forgotten are used again, and make nothing new.
    kept = set(map(id, P_world.wire.remembered.values()))
    _sum(P_world, 4 * LIMIT - 1)
    assert set(map(id, P_world.wire.remembered.values())) == kept


@pytest.mark.usefixtures("few")
@distributed(3, transports=("loopback",))
def test_all_ranks_of_an_operator_forget_it_together(P_world: Partition) -> None:
    """Either all ranks agree again or none, also with other operators in between."""
    roots = [partition_of(P_world, [rank], [1]) for rank in range(3)]
    P_pair = partition_of(P_world, [1, 2], [2])

    def copy() -> None:
        mine = torch.arange(5.0) if roots[1].active else torch.empty(0)
        y = broadcast(mine, roots[1], P_pair)
        if P_pair.active:
            assert_same(y, torch.arange(5.0))

    for n in range(1, 3 * LIMIT):
        copy()
        x = torch.ones(n) if roots[0].active else torch.empty(0)
        if not roots[2].active:
            send_recv(x, roots[0], roots[1], global_shape=[n])
        if P_pair.active and n % 3 == 0:
            mine = torch.ones(n) if roots[1].active else torch.empty(0)
            broadcast(mine, roots[1], P_pair, global_shape=[n])
    before = operations(P_world)
    copy()
    copy()
    after = operations(P_world)
    # One of them may have been the first of a kind again, on both workers of the pair.
    rounds = P_world.allgather_data([after - before])
    assert rounds[1] == rounds[2] and rounds[1][0] > rounds[0][0]


@distributed(2, transports=("loopback",))
def test_boxings_of_many_shapes_are_forgotten(P_world: Partition) -> None:
    placement = Placement("cpu", [0, 1], P_world)
    remembered: dict = P_world.wire.remembered
    boxings = remembered[boxing._bind.__wrapped__] = Cache(LIMIT)  # pyright: ignore
    for n in range(1, 3 * LIMIT):
        x = to_global(torch.arange(float(n)), placement, (B,))
        y = x.to_global(sbp=(S(0),))
        assert_same(y.to_global(sbp=(B,)).to_local(), torch.arange(float(n)))
        assert len(boxings) <= LIMIT
    assert len(boxings) == LIMIT
