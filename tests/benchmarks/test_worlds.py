"""Worlds that answer, are wrong, die and hang."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from benchmarks import worlds
from benchmarks.measure import measure, rows_of
from benchmarks.worlds import NEW, RECYCLED, World, WorldFailed, started
from tests.benchmarks import fake_ranks


def processes_of(world: World) -> list[int]:
    """Process ids of the world's ranks that are alive."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text()
            if world.address in command and stat_of(int(folder.name))[0] != "Z":
                found.append(int(folder.name))
    return found


def stat_of(pid: int) -> list[str]:
    """Return the fields of the process's stat, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_times_are_the_maximum_over_ranks_and_peers_take_turns() -> None:
    case = fake_ranks.case({"gpudist": {"ms": [1.0, 6.0]}, "peer": {"ms": [3.0, 1.0]}})
    with started([fake_ranks.launch(2)], 2) as (world,):
        ours, peer = measure(case, [world], 23, RECYCLED)
        assert len(processes_of(world)) == 2
    assert len(ours.us) == len(peer.us) == 23
    assert min(ours.us) >= 6000 and min(peer.us) >= 3000
    (row,) = rows_of(case, [ours, peer])
    assert row.correct and row.us_median >= 6000
    assert row.peer_us_median is not None and row.peer_us_median >= 3000
    assert row.ratio == pytest.approx(row.us_median / row.peer_us_median, abs=1e-3)
    assert processes_of(world) == []


@pytest.mark.parametrize("wrong", ["gpudist", "peer"])
def test_a_result_that_is_wrong_on_one_rank_is_flagged(wrong: str) -> None:
    sides = {name: {"ms": 0.01, "wrong": name == wrong} for name in ("gpudist", "peer")}
    with started([fake_ranks.launch(2)], 2) as (world,):
        measured = measure(fake_ranks.case(sides), [world], 20, RECYCLED)
    assert {series.name: series.correct for series in measured} == {
        name: name != wrong for name in ("gpudist", "peer")
    }


def test_sides_into_existing_memory_have_no_new_pages_to_measure() -> None:
    case = fake_ranks.case({"gpudist": {"ms": 0.01}, "a": {"ms": 0.01}, "a bare": {"ms": 0.01}})
    with started([fake_ranks.launch(2)], 2) as (world,):
        names = [series.name for series in measure(case, [world], 20, NEW)]
    assert names == ["gpudist", "a"]


def test_a_rank_that_waits_for_its_turn_uses_no_time() -> None:
    with started([fake_ranks.launch(2)], 2) as (world,):
        world.prepare(fake_ranks.case({"gpudist": {"ms": 0.01}}))
        before_s = [cpu_s(pid) for pid in processes_of(world)]
        time.sleep(1.0)
        after_s = [cpu_s(pid) for pid in processes_of(world)]
    assert len(before_s) == 2
    assert sum(after_s) - sum(before_s) <= 0.02


def test_a_rank_that_dies_ends_the_run_with_what_it_printed() -> None:
    case = fake_ranks.case({"gpudist": {"ms": 0.01, "dies": True}})
    with (
        pytest.raises(WorldFailed, match=r"'fake' of 2 ranks: a rank died(.|\n)*about to die"),
        started([fake_ranks.launch(2)], 2) as (world,),
    ):
        measure(case, [world], 20, RECYCLED)
    assert processes_of(world) == []


def test_a_rank_that_hangs_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "ANSWER_S", 0.5)
    monkeypatch.setattr(worlds, "END_S", 0.5)
    case = fake_ranks.case({"gpudist": {"ms": [0.01, 60_000.0]}})
    with (
        pytest.raises(WorldFailed, match=r"ranks \[1\] did not answer within 0.5 s"),
        started([fake_ranks.launch(2)], 2) as (world,),
    ):
        measure(case, [world], 20, RECYCLED)
    assert processes_of(world) == []


def test_a_world_that_never_comes_up_says_why() -> None:
    missing = worlds.Launch("fake", ["sh", "-c", "echo no such mpirun; exit 7"], {})
    with (
        pytest.raises(WorldFailed, match=r"0 of 2 ranks came up\nno such mpirun"),
        started([missing], 2),
    ):
        pass
