"""Predictions of published work: rows and profiles can be read, and works are counted right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.predictions import contention, work
from benchmarks.predictions.__main__ import main, outcomes
from benchmarks.predictions.contention import Compared, between_nodes, planned_s, tree_of
from benchmarks.predictions.page import page
from benchmarks.predictions.rows import SOURCES, machine, profiles_digest, read_rows
from gpudist.planning import CollectiveRates, Link, Profile

MACHINE = Profile(
    "test", "made up", "nccl", 8, Link(1, 0, 4.0), Link(2, 0, 1.0), 1.0, 1000.0, 0.0,
    collectives=CollectiveRates(0, 0, 0, 2.0),
)  # fmt: skip
ROWS = [
    {"name": "a", "kind": "message", "profile": "a40", "size_bytes": 8, "measured": 22.4,
     "unit": "us", "within": 0.25, "source": "nobody"},
    {"name": "b", "kind": "message", "profile": "a40", "size_bytes": 8, "measured": 99.0,
     "unit": "us", "within": 0.25, "source": "nobody", "is_traced": False},
    {"name": "a over b", "kind": "ratio", "of": ["a", "b"], "measured": 1.0, "unit": "times",
     "source": "both"},
]  # fmt: skip


def test_every_row_names_its_source_its_work_and_its_machine():
    rows = read_rows()
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) >= 28
    for row in rows:
        assert row.source
        assert row.low <= row.measured <= row.high
        if row.kind == "ratio":
            assert set(row.of) <= set(names)
        else:
            assert row.kind in work.WORKS
            assert machine(row.profile).wire == "nccl"
    sources = json.loads(SOURCES.read_text(encoding="utf-8"))
    assert {row.profile for row in rows if row.profile} == sources.keys()


def test_errors_are_held_against_goals(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS), encoding="utf-8")
    near, far, ratio = outcomes(read_rows(path))
    assert near.ratio == pytest.approx(1, rel=1e-3)
    assert (near.is_reached, far.is_reached, ratio.is_reached) == (True, False, None)
    assert ratio.predicted == 1


def test_the_command_keeps_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows, kept = tmp_path / "rows.json", tmp_path / "kept.json"
    rows.write_text(json.dumps(ROWS), encoding="utf-8")
    assert main(["--rows", str(rows), "--json", str(kept), "--trees"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 goals reached." in printed
    assert "b *" in printed
    facts = json.loads(kept.read_text(encoding="utf-8"))
    assert [row["measured"] for row in facts["rows"]] == [22.4, 99.0, 1.0]
    facts["trees"] = [{"name": "halo", "ranks": 64, "taper": 2, "planned_s": 1, "replayed_s": 2}]
    text = page(read_rows(rows), facts, facts, {"a40": {"network": "a paper"}})
    assert "| halo | 64 | 1/2 | 1000000.0 us | 2000000.0 us | 0.50 | differs |" in text


def test_a_changed_profile_is_noticed(tmp_path: Path):
    path = tmp_path / "a100.json"
    MACHINE.save(path)
    before = profiles_digest(tmp_path)
    replace(MACHINE, tflops=2.0).save(path)
    assert profiles_digest(tmp_path) != before


def test_a_slab_moves_seven_eighths_of_its_block_twice():
    seconds, terms = work.transposes(MACHINE, (16, 16, 16), 8, (1, 8))
    block_bytes = 16**3 * 8 // 8
    assert terms["messages"] == pytest.approx(2 * (1e-6 + 7 / 8 * block_bytes / 4e9))
    assert seconds == pytest.approx(sum(terms.values()))
    pencil = work.transposes(MACHINE, (16, 16, 16), 8, (2, 4))[1]["messages"]
    assert pencil == pytest.approx(4 * 1e-6 + 2 * (1 / 2 + 3 / 4) * block_bytes / 4e9)


def test_bus_bandwidth_is_that_of_the_links():
    value, _ = work.bus_bandwidth(MACHINE, "all_reduce", 8, 10**9)
    assert value == pytest.approx(2e9)
    value, _ = work.bus_bandwidth(
        replace(MACHINE, network=Link(0, 0, 0.1)), "all_gather", 16, 10**9
    )
    assert value == pytest.approx(15 / 16 * 8 * 0.1e9)


def test_messages_of_a_halo_between_nodes_take_the_card():
    messages = between_nodes(contention.halo(64), 8)
    assert all(a // 8 != b // 8 for a, b, _ in messages)
    assert {n for *_, n in messages} == {64 * 64 * 32 * 4}  # bytes of a face
    most = max(sum(n for a, _, n in messages if a == rank) for rank in range(64))
    assert planned_s(MACHINE, messages) == pytest.approx(most / 1e9)


@pytest.mark.parametrize("ranks", [64, 512, 4096])
def test_trees_have_a_leaf_for_every_rank(ranks: int):
    _, down, up, _ = tree_of(ranks, 2)
    leaves = 1
    for links in down:
        leaves *= links
    assert leaves == ranks
    assert up[1] * 2 == down[0]


def test_a_difference_above_a_fifth_is_told():
    assert not Compared("", 64, 1, 1.19, 1.0).differs
    assert Compared("", 64, 1, 0.79, 1.0).differs
    assert contention.python_with_simgrid(("/nowhere/python",)) is None


def test_simgrid_shares_a_link():
    python = contention.python_with_simgrid((sys.executable, "/usr/bin/python3"))
    if python is None:
        pytest.skip("no Python here imports simgrid")
    # Two ranks of one leaf send to a third: its link is shared.
    seconds = contention.replayed_s(python, MACHINE, 64, 1, [(0, 2, 10**6), (1, 2, 10**6)])
    assert seconds == pytest.approx(2 * 10**6 / 1e9, rel=1e-3)
