"""Ranks that disagree raise, over the doubles of NCCL, and get no wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpudist import ops
from gpudist.errors import CollectiveTimeout, PlanMismatch, ShapeError, TransportError
from gpudist.transport.base import Transport
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.nccl import clear
from tests.transport.nccl_actions import (
    Fate,
    all_sum_reduce,
    block_of,
    check_all_failed,
    fate_of,
    halo,
    halo_of,
    line,
)
from tests.transport.worlds import results

RANKS = 3
DEADLINE_S = 1.5
LONG_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    results("nccl", RANKS, Transport.check, timeout_s=60.0)


def other_shape(P_world: Partition) -> torch.Tensor:
    """Exchange more rows, and therefore longer messages."""
    return halo_of(P_world, rows=5)(torch.ones(5, 6))


def other_dtype(P_world: Partition) -> torch.Tensor:
    return halo_of(P_world)(block_of(P_world).double())


def other_widths(P_world: Partition) -> torch.Tensor:
    x = block_of(P_world)
    extents = [4, 6 * P_world.size]
    return ops.HaloExchange(
        line(P_world), halo=((2, 2),), periodic=True, global_shape=extents
    )(x)  # fmt: skip


def other_operator(P_world: Partition) -> torch.Tensor:
    gather = ops.AllGather(line(P_world), [1], global_shape=[4, 6 * P_world.size])
    return gather(block_of(P_world))


def other_sum(P_world: Partition) -> torch.Tensor:
    return ops.all_sum_reduce(torch.arange(7.0).reshape(1, 7), line(P_world), [1])


def wide_sum(P_world: Partition) -> torch.Tensor:
    x = torch.arange(5.0, dtype=torch.float64).reshape(1, 5)
    return ops.all_sum_reduce(x, line(P_world), [1])


PAIRS: dict[str, tuple[Callable[[Partition], torch.Tensor], Callable]] = {
    "shape": (halo, other_shape),
    "dtype": (halo, other_dtype),
    "widths": (halo, other_widths),
    "operator": (halo, other_operator),
}
SUMS: dict[str, tuple[Callable[[Partition], torch.Tensor], Callable]] = {
    "shape of a sum": (all_sum_reduce, other_sum),
    "dtype of a sum": (all_sum_reduce, wide_sum),
}


def disagree(transport: Transport, name: str, rank: int, checks: bool, is_bound: bool) -> Fate:
    """One rank does one thing, the others another; or, if that is bound, both in another order."""
    assert isinstance(transport, NcclTransport)
    P_world = runtime.world_of(transport)
    common, other = (PAIRS | SUMS)[name]
    clear()
    transport.compares_every_call = checks
    expected: list[torch.Tensor] = []

    def bind_both() -> None:
        """A rank that is ahead may fail, and with it those that are still here."""
        if is_bound:
            expected.extend([common(P_world), other(P_world)])

    def do(number: int) -> None:
        result = (common, other)[number](P_world)
        if expected and not torch.equal(result, expected[number]):
            raise AssertionError(f"wrong numbers: {result} is not {expected[number]}")

    mine = [1, 0] if transport.rank == rank else [0, 1]
    afterwards = [lambda: do(0)] * 3
    return fate_of(transport, bind_both, lambda: do(mine[0]), lambda: do(mine[1]), *afterwards)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", PAIRS)
def test_first_calls_are_compared(name: str, rank: int) -> None:
    fates = results("nccl", RANKS, disagree, name, rank, False, False, timeout_s=LONG_S)
    check_mismatch(fates, rank)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_agreed_beforehand(name: str) -> None:
    """Blocks must be equal, which all ranks check; the world remains usable."""
    for fate in results("nccl", RANKS, disagree, name, 2, False, False, timeout_s=DEADLINE_S):
        assert isinstance(fate.error, (PlanMismatch, ShapeError)), fate
        assert fate.after_s < DEADLINE_S


@pytest.mark.parametrize("name", [*PAIRS, *SUMS])
def test_all_calls_are_compared_where_that_is_asked_for(name: str) -> None:
    fates = results("nccl", RANKS, disagree, name, 1, True, True, timeout_s=LONG_S)
    check_mismatch(fates, 1)


def check_mismatch(fates: list[Fate], rank: int) -> None:
    """All learn the same: what two of them meant, of which one is ``rank``."""
    texts = check_all_failed(fates, DEADLINE_S, PlanMismatch)
    assert len(set(texts)) == 1, texts
    assert f"rank {rank} " in texts[0] and "ranks disagree about" in texts[0]


@pytest.mark.parametrize("name", [*PAIRS, *SUMS])
def test_later_calls_of_other_sizes_end_without_wrong_numbers(name: str) -> None:
    """The double raises where NCCL would hang; equal sizes cannot be distinguished."""
    fates = results("nccl", RANKS, disagree, name, 1, False, True, timeout_s=DEADLINE_S)
    for fate in fates:
        assert isinstance(fate.error, (CollectiveTimeout, TransportError)), fate
        assert "another" not in str(fate.misuses), fate
        assert fate.after_s < DEADLINE_S + 1
