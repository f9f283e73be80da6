"""``gpudist plan --search`` prints and writes a plan, which ``gpudist plan --plan`` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpudist import Plan
from gpudist.cli import main
from gpudist.planning import layout_search
from tests.planning.test_layout_search import SLOW

NETWORK = ["plan", "tests.planning.test_layout_search:Skips", "--shape", "2", "2", "64", "64"]


def test_a_searched_plan_is_printed_written_and_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout_search, "_REHEARSED", 1)
    SLOW.save(tmp_path / "slow.json")
    command, file = [*NETWORK, "--profile", str(tmp_path / "slow.json")], tmp_path / "plan.json"
    grid = ["--grid", "1", "1", "2", "1"]
    assert main([*command, *grid, "--search", "--amp", "bf16", "-o", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = Plan.load(file)
    assert found.grid == (1, 1, 2, 1) and found.layouts
    assert lines[0].startswith("slow: ")
    assert max(len(line) for line in lines if str(file) not in line) <= 80
    words = " ".join(" ".join(lines).split())
    assert all(note in words for note in found.notes)
    assert all(f"layout of {pin}" in words for pin in found.layouts)
    # The file says how many workers there are, and their grid.
    assert main([*command, "--plan", str(file), "--best", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (planned,) = [row for row in rows if row["plan"] is not None]
    assert planned["grid"] == [1, 1, 2, 1]
    assert planned["plan"] == json.loads(found.to_text())


def test_a_search_without_a_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout_search, "_REHEARSED", 1)
    command = ["plan", "torch.nn:ReLU", "--shape", "2", "2", "--ranks", "2", "--search"]
    assert main(command) == 0
    assert "No other layouts save time." in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"] == []
