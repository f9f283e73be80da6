"""Pictures of rows: which ones, their contents, and that those in the docs match the results."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.case import Case
from benchmarks.files import Run, write
from benchmarks.measure import Series, rows_of
from benchmarks.rows import MEMORY_COPY, NO_COMMUNICATION, ONE_RANK, Row

pytest.importorskip("matplotlib")

from benchmarks import plot
from benchmarks.plots.bandwidth import bandwidth
from benchmarks.plots.beside import beside
from benchmarks.plots.scaling import scaling


def measured(subject: str, name: str, ranks: int, nbytes: int, **us: float) -> list[Row]:
    sides = [Series(side.replace("_", " "), [each] * 20) for side, each in us.items()]
    return rows_of(Case(subject, name, ranks, nbytes, {}), sides)


BROADCAST = [
    row
    for nbytes in (1000, 10_000, 100_000)
    for row in measured(
        "broadcast", str(nbytes), 2, nbytes, gpudist=nbytes / 100, gloo=nbytes / 10,
        **{MEMORY_COPY: nbytes / 1000},
    )
]  # fmt: skip
SCALING = [
    row
    for ranks, us in ((2, 60.0), (4, 40.0))
    for row in measured(
        "scaling", "strong, conv layer, [8] global", ranks, 8, gpudist=us,
        **{ONE_RANK: 100.0, NO_COMMUNICATION: us / 2},
    )
]  # fmt: skip


def lines_of(axis: object) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}  # type: ignore[attr-defined]


def test_bandwidth_is_below_its_ceiling() -> None:
    figure = bandwidth(BROADCAST, 2)
    assert figure is not None
    (axis,) = figure.axes
    assert axis.get_title() == "broadcast, 2 ranks"
    lines = lines_of(axis)
    assert set(lines) == {"gpudist", "gloo", "ceiling: memory copy"}
    assert lines["gpudist"] == pytest.approx([0.1] * 3)
    assert lines["gloo"] == pytest.approx([0.01] * 3)
    assert lines["ceiling: memory copy"] == pytest.approx([1.0] * 3)
    assert bandwidth(BROADCAST, 4) is None


def test_a_sum_is_drawn_with_its_factor() -> None:
    rows = [replace(row, subject="all_sum_reduce", ranks=4) for row in BROADCAST]
    figure = bandwidth(rows, 4)
    assert figure is not None
    lines = lines_of(figure.axes[0])
    assert lines["gpudist"] == pytest.approx([0.15] * 3)
    assert lines["ceiling: memory copy"] == pytest.approx([1.0] * 3)


def test_one_bare_message_is_the_link() -> None:
    bare = [
        row
        for nbytes in (1000, 10_000, 100_000)
        for row in measured("messages", f"{nbytes}, bare", 2, nbytes, gpudist=nbytes / 500)
    ]
    figure = bandwidth([*BROADCAST, *bare], 2)
    assert figure is not None
    assert lines_of(figure.axes[0])["ceiling: link (one bare message)"] == pytest.approx([0.5] * 3)


def test_speedups_are_over_one_rank_of_the_same_world() -> None:
    figure = scaling(SCALING, cores=2)
    assert figure is not None
    lines = lines_of(figure.axes[0])
    assert lines["gpudist"] == pytest.approx([1, 100 / 60, 100 / 40])
    assert lines[f"ceiling: {NO_COMMUNICATION}"] == pytest.approx([1, 100 / 30, 100 / 20])
    assert lines["ceiling: ideal"] == [1, 2, 4]
    assert lines["ceiling: 2 cores"] == [1, 2, 2]
    assert scaling(BROADCAST) is None


def test_beside_has_a_line_for_each_case() -> None:
    figure = beside(BROADCAST, "broadcast", 2)
    assert figure is not None
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1000", "10000", "100000"]
    names = axis.get_legend_handles_labels()[1]
    assert names == ["gloo", "bound: memory copy", "same time"]


def test_the_command_writes_both_formats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(BROADCAST, {}, tmp_path / "broadcast-2.jsonl")
    out = tmp_path / "plots"
    arguments = [str(tmp_path), "--output", str(out), "--json"]
    monkeypatch.setattr(sys, "argv", ["plot", *arguments])
    assert plot.main() == 0
    names = [
        str(out / f"{name}.{ending}")
        for name in ("bandwidth-2", "beside-broadcast-2")
        for ending in ("png", "svg")
    ]
    assert json.loads(capsys.readouterr().out) == names
    assert (out / "bandwidth-2.png").read_bytes().startswith(b"\x89PNG")
    svg = (out / "bandwidth-2.svg").read_bytes()
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert plot.main() == 0
    assert (out / "bandwidth-2.svg").read_bytes() == svg
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / "none")])
    assert plot.main() == 2


def test_rows_without_peers_make_no_picture() -> None:
    rows = measured("planning", "one rank", 2, 0, gpudist=3.0)
    assert plot.pictures([Run("planning-2", {}, rows)]) == {}
