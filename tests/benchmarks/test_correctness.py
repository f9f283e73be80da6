"""Verdicts on libraries: the judge can fail each way, and gpudist is right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.correctness import __main__ as command
from benchmarks.correctness.__main__ import Row, rows_of, runs
from benchmarks.correctness.case import LAYOUTS, Case, Layout
from benchmarks.correctness.cases import CASES
from benchmarks.correctness.judge import Verdict
from benchmarks.correctness.libraries import ABSENT, LIBRARIES, Peer
from benchmarks.correctness.page import cell, page, read_all
from benchmarks.correctness.world import CannotStart, Library
from tests import warm

ROWS = LAYOUTS[0]
LIMIT_S = 5.0
HANDFUL = (
    "conv 3, stride 2, padding 1", "conv 15, padding 7", "max pool 2, padding 1",
    "batch norm, train", "bilinear aligned, twice", "second order: two convolutions",
)  # fmt: skip


def case(name: str) -> Case:
    (found,) = (each for each in CASES if each.name == name)
    return found


@pytest.fixture(scope="module")
def wrong_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    log = tmp_path_factory.mktemp("correctness") / "log"
    adapter = "tests.benchmarks.correctness_adapter"
    with Library(adapter, Path(sys.executable), log, LIMIT_S) as library:
        yield library


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("conv 3, padding 1", "right", ""),
        ("conv 3", "silently wrong", "output"),
        ("conv 5, padding 2", "silently wrong", "output: not a number"),
        ("conv 1", "silently wrong", "input gradient missing"),
        ("conv 2", "silently wrong", "gradient of parameter 0"),
        (
            "conv 4, padding 1",
            "silently wrong",
            "output: shape [1, 6, 11, 8] instead of [1, 6, 11, 9]",
        ),
        ("conv 3, stride 2", "refused", "ValueError: not this kernel"),
        ("conv 3, stride 3", "crash/hang", "no answer within 5 s"),
        ("conv 3, circular", "crash/hang", "SIGABRT"),
        ("conv 3, reflect", "not offered", ""),
        ("two convolutions", "right", ""),
    ],
)
def test_each_way_to_fail_has_its_verdict(
    wrong_library: Library, name: str, kind: str, detail: str
):
    found = wrong_library.verdict(case(name), ROWS)
    assert (found.kind, found.detail) == (kind, detail)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpudist.distribute", "gpudist.nn"])
def test_gpudist_is_right(name: str):
    (peer,) = (each for each in LIBRARIES if each.name == name)
    chosen = [(case(name), layout) for name in HANDFUL for layout in LAYOUTS[:2]]
    rows = [*rows_of(peer, chosen, limit_s=60)]
    assert [row for row in rows if row.kind != "right"] == []
    assert all(row.error is not None and row.error < 1e-9 for row in rows)
    assert rows[0].version.startswith("0.")


def test_cases_are_many_and_have_names_of_their_own():
    assert len({each.name for each in CASES}) == len(CASES) >= 60
    chosen = runs()
    assert [layout.ranks for _, layout in chosen] == sorted(each.ranks for _, each in chosen)
    for each, layout in chosen:
        shape = each.shape_in(layout)
        assert (shape[2] % 2 == 1) or not layout.is_uneven
        assert all(shape[dim] >= 2 for dim in layout.dims)


def test_an_adapter_that_cannot_start_says_why(tmp_path: Path):
    with pytest.raises(CannotStart, match="No module named"):
        Library("tests.nothing", Path(warm.python()), tmp_path / "log", LIMIT_S)


def test_the_page_names_layouts_that_differ():
    def row(layout: str, verdict: Verdict) -> Row:
        return Row("L", "1", None, "conv 3", layout, **asdict(verdict))

    right = [row("rows", Verdict("right", error=0.0)), row("columns", Verdict("right", error=0.0))]
    assert cell("conv 3", right) == "right"
    wrong = row("both", Verdict("silently wrong", "output", 0.5))
    shape = row("uneven", Verdict("silently wrong", "output: shape [1] instead of [2]"))
    text = cell("conv 3", [*right, wrong, shape])
    assert text == "right: rows, columns; **silently wrong** (0.5, shape): both, uneven"
    lost = row("rows", Verdict("crash/hang", "SIGABRT"))
    assert cell("conv 3", [lost]) == "**crash/hang** (SIGABRT)"
    refused = row("rows", Verdict("refused", "ValueError: a | b"))
    made = page({"L": [*right, refused]}, ["here"])
    assert "| L | 1 | 3 | 2 | 1 | 0 | 0 | 0 |" in made
    assert "| L | `ValueError: a / b` | 1 |" in made
    assert all(name in made for name in ABSENT)


def test_the_command_writes_a_file_for_each_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """No library starts."""

    def not_offered(
        peer: Peer, chosen: Sequence[tuple[Case, Layout]], limit_s: float
    ) -> Iterator[Row]:
        for each, layout in chosen:
            found = asdict(Verdict("not offered"))
            yield Row(peer.name, "1", None, each.name, layout.name, **found)

    monkeypatch.setattr(command, "rows_of", not_offered)
    options = ["--library", "gpudist.nn", "--cases", "mean of a column", "--json", str(tmp_path)]
    assert command.main(options) == 0
    assert "gpudist.nn" in capsys.readouterr().out
    rows, environments = read_all(tmp_path)
    assert {row.kind for row in rows["gpudist.nn"]} == {"not offered"}
    assert len(environments) == 1
    file = tmp_path / "gpudist_layers.jsonl"
    first, *lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert json.loads(first)["environment"]["commit"]
    assert len(lines) == 4
    file.write_text("".join([first, *lines[:-1]]), encoding="utf-8")
    assert command.main([*options, "--resume"]) == 0
    assert file.read_text(encoding="utf-8").splitlines(keepends=True)[1:] == lines
    with pytest.raises(SystemExit):
        command.main(["--cases", "conv", "--json"])


def test_a_peer_without_an_environment_is_left_out():
    assert not Peer("nowhere", "nothing", "nowhere").is_installed
