"""The check passes on every transport, and finds what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpudist import Partition
from gpudist.cli.self_check import LinkSpeed, Report, Result, cases, check, verdict
from gpudist.cli.self_check.cases import Case
from gpudist.cli.self_check.run_cases import SLOW_SHARE
from gpudist.ops import OPERATORS
from tests.pool import distributed

NAMES = [row.name for row in OPERATORS]
VARIANTS = ["halo_exchange, dim after dim", "halo_exchange, periodic"]


@distributed(ranks=[1, 3, 4])
def test_all_operators_pass(P_world: Partition) -> None:
    calls: list[tuple[str, int, int]] = []
    report = check(P_world, 1, lambda *call: calls.append(call))
    assert sorted(result.name for result in report.results) == sorted(NAMES + VARIANTS)
    assert report.passed and all(result.exact for result in report.results)
    assert max(result.adjoint_error for result in report.results) < 1e-14
    assert min(result.gbps for result in report.results) > 0 and report.copy_gbps > 0
    assert (report.ranks, report.transport) == (P_world.size, P_world.transport)
    n = P_world.size
    assert len(report.links) == len(report.kinds) == n * (n - 1) // 2
    assert all(link.right for link in report.links)
    operators = [name for name, _ in cases(P_world, 1, 1)]
    told = ["plain copy", *operators, "links", ""]
    assert calls == [(name, i, len(told) - 1) for i, name in enumerate(told)]
    mine = [int(result.time_us * 1e3) for result in report.results]
    assert P_world.allreduce_data(mine, "max") == mine


@distributed(ranks=2, transports=("loopback",))
def test_cases_expect_what_they_say(P_world: Partition) -> None:
    made = {name: make() for name, make in cases(P_world, 1, 3)}
    first = P_world.rank == 0
    halo = made["halo_exchange"].expected
    assert halo is not None
    # Cells 1 2 3 and 4 5 6, cut by columns: 2 and 1 of them.
    own = [[0, 1, 2, 3], [0, 4, 5, 6]] if first else [[2, 3, 0], [5, 6, 0]]
    assert halo[1:-1].tolist() == own and halo[0].abs().sum() == 0
    gathered = made["gather"].expected
    assert (gathered is None) != first
    total = made["sum_reduce"].expected
    assert (total is not None) == first
    if total is not None:
        assert total.tolist() == [[3, 5, 7]]


@distributed(ranks=4, transports=("loopback", "host"))
def test_an_operator_without_a_case_is_checked_by_its_sample(P_world: Partition) -> None:
    case = dict(cases(P_world, 1, 6))["shift"]()
    # Cells 1 to 24, four rows of six on a grid of 2 x 2; each block comes from across.
    blocks = torch.arange(1, 25).reshape(2, 2, 2, 3).transpose(1, 2).reshape(4, 2, 3).tolist()
    assert case.x.tolist() == blocks[P_world.rank or 0]
    assert case.expected is not None
    assert case.expected.tolist() == blocks[3 - (P_world.rank or 0)]
    assert case.is_exact(case.operator(case.x))


def test_a_wrong_cell_is_found() -> None:
    expected = torch.ones(2, 2)
    case = Case(torch.clone, expected, expected)
    assert case.is_exact(expected.clone())
    assert not case.is_exact(expected + torch.eye(2))
    assert not case.is_exact(torch.ones(2, 1))
    assert not Case(torch.clone, expected, None).is_exact(expected)


def report(*results: Result, transport: str = "host") -> Report:
    return Report(4, transport, "cpu", 10.0, results)


GOOD = Result("gather", True, 1e-16, 10.0, 5.0, 0.5)
INEXACT = Result("scatter", False, 1e-16, 10.0, 5.0, 0.5)
NO_ADJOINT = Result("broadcast", True, 1e-3, 10.0, 5.0, 0.5)
BROKEN = LinkSpeed(0, 3, False, 20.0)
SLOW = Result("repartition", True, 1e-16, 10.0, 5.0, SLOW_SHARE / 2)


@pytest.mark.parametrize(
    ("found", "passed", "words"),
    [
        (report(GOOD), True, "All 1 operators are right on 4 ranks over host; the slowest"),
        (report(GOOD, INEXACT), False, "1 of 2 operators are wrong: scatter."),
        (report(NO_ADJOINT, GOOD), False, "1 of 2 operators are wrong: broadcast."),
        (report(GOOD, SLOW), True, "less than 10% of a plain copy's speed: repartition. Another"),
        (replace(report(GOOD), links=(BROKEN,)), False, "messages arrive wrong between ranks 0-3"),
        (report(SLOW, transport="gloo"), True, "gloo goes through the network's sockets"),
        (report(SLOW, transport="nccl"), True, "`gpudist env` shows how the GPUs are linked"),
    ],
)
def test_verdict(found: Report, passed: bool, words: str) -> None:
    assert found.passed is passed
    assert words in verdict(found)
