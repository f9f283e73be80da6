"""Everything follows the order of torch's current stream, and nothing waits for the host."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.devices import require_gpu
from tests.gpu.streams import added_into, on_late_stream, replayed, started, streams_in_turn
from tests.gpu.worlds import World, assert_as_on_cpus

require_gpu()

CASES = (
    "halo, periodic",
    "halo, periodic, nested",
    "repartition of rows to columns",
    "all-sum-reduce",
    "broadcast from the last",
)
every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_late_stream(world: World, case: str) -> None:
    assert_as_on_cpus(world, on_late_stream, case=case)


def test_streams_in_turn(world: World) -> None:
    assert_as_on_cpus(world, streams_in_turn)


@pytest.mark.parametrize("is_late", [False, True], ids=["current stream", "late stream"])
def test_start_and_wait(world: World, is_late: bool) -> None:
    assert_as_on_cpus(world, started, is_late=is_late)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_started_into_a_tensor(world: World, dtype: torch.dtype) -> None:
    assert_as_on_cpus(world, added_into, dtype=dtype)


@every_case
def test_graph(world: World, case: str) -> None:
    assert_as_on_cpus(world, replayed, case=case)
