"""Rows of a GPU's cases, with clocks that return given times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.case import Side
from benchmarks.files import write
from benchmarks.gpu import files
from benchmarks.gpu.machine import Call, HostMachine
from benchmarks.gpu.measure import FASTEST_US, MAX_CALLS, GpuCase, GpuRow, calls_for, measure
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition


@dataclass
class ToldMachine(HostMachine):
    """A call takes as many microseconds as it returns; enqueuing takes a tenth of that."""

    timed: list[tuple[str, float, int]] = field(default_factory=list)

    def device_us(self, call: Call, calls: int) -> float:
        self.timed.append(("device", call(), calls))
        return call()

    def enqueue_us(self, call: Call, calls: int) -> float:
        self.timed.append(("enqueue", call(), calls))
        return call() / 10


def side(us: float, right: bool | list[bool] = True) -> Side:
    answers = iter(right) if isinstance(right, list) else None
    return Side(lambda: us, lambda _: next(answers) if answers is not None else bool(right))


def alone(
    P_world: Partition, case: GpuCase, sides: dict[str, Side], machine: ToldMachine
) -> list[GpuRow]:
    return measure(case, sides, machine, P_world, 20)


def measured(case: GpuCase, sides: dict[str, Side], machine: ToldMachine) -> list[GpuRow]:
    return run_distributed(alone, 1, case, sides, machine)[0]


CASE = GpuCase("copy", "64 MiB", 1, 8000, {})


def test_rows_are_beside_each_peer() -> None:
    machine = ToldMachine()
    rows = measured(CASE, {"gpudist": side(4.0), "copy_": side(2.0), "torch": side(8.0)}, machine)
    assert [(row.peer, row.ratio, row.correct) for row in rows] == [
        ("copy_", 2.0, True),
        ("torch", 0.5, True),
    ]
    assert {(row.us_median, row.gbps) for row in rows} == {(4.0, 2.0)}
    turns = [us for _, us, calls in machine.timed if calls > 1]
    assert [turns.count(us) for us in (4.0, 2.0, 8.0)] == [20, 20, 20]
    assert {calls for _, _, calls in machine.timed[3:]} == {MAX_CALLS}
    # Each round starts with the next side.
    assert turns[:12:4] == [4.0, 2.0, 8.0] and turns[12:24:4] == [2.0, 8.0, 4.0]


def test_the_time_to_enqueue_has_no_bandwidth() -> None:
    machine = ToldMachine()
    case = GpuCase("latency", "pack", 1, 8000, {}, clock="enqueue")
    (row,) = measured(case, {"gpudist": side(40.0)}, machine)
    assert (row.us_median, row.gbps, row.peer, row.ratio) == (4.0, None, "none", None)
    assert {clock for clock, *_ in machine.timed} == {"enqueue"}


@pytest.mark.parametrize("right", [[False, True], [True, False]], ids=["before", "after"])
def test_a_wrong_result_spoils_the_row(right: list[bool]) -> None:
    sides = {"gpudist": side(4.0), "copy_": side(2.0, right), "torch": side(8.0)}
    rows = measured(CASE, sides, ToldMachine())
    assert [row.correct for row in rows] == [False, True]


def on_two(P_world: Partition) -> list[GpuRow]:
    slower = P_world.rank == 1
    sides = {"gpudist": side(6.0 if slower else 4.0), "torch": side(3.0, not slower)}
    return measure(CASE, sides, ToldMachine(), P_world, 20)


def test_times_are_the_maximum_over_ranks_and_all_must_be_right() -> None:
    for (row,) in run_distributed(on_two, 2):
        assert (row.us_median, row.peer_us_median, row.correct) == (6.0, 3.0, False)


@pytest.mark.parametrize(
    ("us", "calls"), [([FASTEST_US, 1e6], 1), ([FASTEST_US / 4, 1.0e3], 4), ([0.0], MAX_CALLS)]
)
def test_short_calls_are_repeated(us: list[float], calls: int) -> None:
    assert calls_for(us) == calls


def test_a_file_has_the_machine_and_the_rows(tmp_path: Path) -> None:
    rows = measured(CASE, {"gpudist": side(4.0), "copy_": side(2.0)}, ToldMachine())
    path = files.path_of("copy", 1, tmp_path / "results")
    write(rows, files.machine("abc"), path)
    assert path.name == "gpu-copy.jsonl"
    machine, found = files.read(path)
    assert [GpuRow(**row) for row in found] == rows
    assert {"gpu", "driver", "cuda", "torch", "nccl", "commit", "date"} <= set(machine)
    assert machine["commit"] == "abc"


def test_results_of_several_ranks_have_a_file_of_their_own(tmp_path: Path) -> None:
    assert files.path_of("enqueue", 2, tmp_path).name == "gpu-enqueue-2ranks.jsonl"


def test_a_line_says_what_is_wrong() -> None:
    (row,) = measured(CASE, {"gpudist": side(4.0), "copy_": side(2.0, False)}, ToldMachine())
    line = files.line_of(row)
    assert line.endswith("2.00  WRONG") and "2 GB/s" in line and "64 MiB" in line
