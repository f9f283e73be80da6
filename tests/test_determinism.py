"""``init(deterministic=True)``: the same bits over every transport and in every run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch

from gpudist import ops
from gpudist.exchange import all_reduce
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from gpudist.world.runtime import _make_torch_deterministic
from tests.determinism_bodies import (
    Results,
    in_rank_order,
    layers_in_place,
    operators,
    training,
    values,
)
from tests.doubles import nccl, use_doubles
from tests.pool import distributed, the_pool

RANKS = 4
BODIES: dict[str, Callable[[Partition], Results]] = {
    "operators": operators,
    "layers in place": layers_in_place,
    "training": training,
}
every_body = pytest.mark.parametrize("body", list(BODIES))


@cache
def over_threads(body: str) -> list[Results]:
    """Return each rank's results, which every other transport and run must reproduce."""
    return run_distributed(BODIES[body], RANKS)


def require_same_bytes(found: list[Results], expected: list[Results]) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if mine[name] != theirs[name]] == [], f"on rank {rank}"


@pytest.mark.one_in(2)
@every_body
@pytest.mark.parametrize("transport", ["host", "gloo", "nccl"])
def test_the_same_bits_over_every_transport(body: str, transport: str) -> None:
    if transport == "nccl":
        use_doubles()
    found = the_pool().run(RANKS, BODIES[body], transport=transport)
    require_same_bytes(found, over_threads(body))


@every_body
def test_the_same_bits_in_every_run(body: str) -> None:
    for _ in range(2):
        require_same_bytes(run_distributed(BODIES[body], RANKS), over_threads(body))


def test_other_values_give_other_bits() -> None:
    found = run_distributed(partial(operators, seed=1), RANKS)
    with pytest.raises(AssertionError, match="on rank 0"):
        require_same_bytes(found, over_threads("operators"))


def test_the_order_of_additions_shows_in_these_values() -> None:
    for dtype in (torch.float32, torch.float64):
        parts = [values((7,), rank, dtype) for rank in range(RANKS)]
        upwards = ((parts[0] + parts[1]) + parts[2]) + parts[3]
        downwards = ((parts[3] + parts[2]) + parts[1]) + parts[0]
        assert not torch.equal(upwards, downwards)


@distributed(ranks=4, transports=("loopback", "host", "gloo", "nccl"))
def test_additions_are_in_ascending_rank_order(P_world: Partition) -> None:
    with in_rank_order(P_world, "additions") as P:
        for cells in (7, 70001):
            parts = [values((cells,), rank, torch.float32) for rank in range(4)]
            expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
            mine = parts[P.wire.rank]
            line = P.create_cartesian_topology_partition([4])
            assert torch.equal(ops.all_sum_reduce(mine, line, [0]), expected)
            assert torch.equal(all_reduce(mine, P), expected)


@distributed(ranks=4, transports=["nccl"])
def test_no_sum_is_nccls_own(P_world: Partition) -> None:
    """NCCL does not specify the order of its sums; the double adds in rank order."""

    def sums() -> set[str]:
        return {line[3] for line in nccl.log()} & {"reduce", "all_reduce", "reduce_scatter"}

    with in_rank_order(P_world, "messages") as P:
        nccl.clear()
        operators_of(P)
        assert not sums()
        assert nccl.log()
    operators_of(P_world)
    assert "all_reduce" in sums()


def operators_of(P: Partition) -> None:
    line = P.create_cartesian_topology_partition([P.size])
    x = values((5,), P.wire.rank, torch.float32).requires_grad_()
    ops.all_sum_reduce(x, line, [0]).sum().backward()
    all_reduce(x.detach(), P)


def test_torch_is_made_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        _make_torch_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        _make_torch_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(before)
