"""docs/reliability.md is what the report makes of the committed results."""

from __future__ import annotations

import json

from tests.chaos.experiment import DEADLINE_S, cells
from tests.chaos.report import DOCUMENT, made, page
from tests.chaos.results import CHAOS, Run, Tried, read, write
from tests.disagreement.__main__ import TRANSPORTS
from tests.soak.__main__ import SUBJECTS

RUN = Run("2026-01-02", 1, DEADLINE_S, 2, "x86_64", "2.13")


def test_the_page_is_that_of_the_committed_results() -> None:
    assert DOCUMENT.read_text() == made()


def test_the_committed_results_have_nothing_bad() -> None:
    _, rows = read(CHAOS)
    assert {row.how for row in rows} == {"detected", "survived"}


def test_no_committed_figure_is_over_its_limit() -> None:
    """Of long runs and of disagreements, which there are over every transport."""
    files = [*CHAOS.parent.glob("soak-*.json"), *CHAOS.parent.glob("disagreement-*.json")]
    names = {path.stem for path in files}
    assert names == {f"soak-{subject}" for subject in SUBJECTS} | {
        f"disagreement-{transport}" for transport in TRANSPORTS
    }
    for path in files:
        limited = [f for f in json.loads(path.read_text())["figures"] if f["limit"] is not None]
        assert limited and all(figure["value"] <= figure["limit"] for figure in limited), path


def test_every_fault_of_every_operator_was_tried_over_every_transport() -> None:
    _, rows = read(CHAOS)
    tried = {(row.operator, row.transport, row.fault) for row in rows}
    assert tried == {cell[:3] for cell in cells()}


def test_what_is_bad_is_counted() -> None:
    rows = [
        Tried("gather", "host", "killed", "before", "detected", (0.1, 0.3)),
        Tried("gather", "host", "killed", "message", "detected", (0.2, 0.5)),
        Tried("gather", "host", "killed", "message", "lost", ()),
        Tried("scatter", "gloo", "slow", "packing", "wrong", ()),
    ]
    soak = {
        "environment": {"command": "make soak", "machine": "this one"},
        "figures": [{"name": "memory", "value": 3, "unit": "KiB", "limit": "8 KiB"}],
    }
    resume = {"kills": ["step 1"], "ranks": 2, "steps": 9, "steps_repeated": 1}
    differences = ["step 3: 1.0 and 2.0"]
    text = page(
        RUN, rows, {"soak-operators": soak, "resume": {**resume, "differences": differences}}
    )
    assert "killed 1 workers" in text and "step 3: 1.0 and 2.0" in text
    assert "4 experiments on 2026-01-02" in text
    assert "of 3 of 2288 kinds" in text
    assert "1 lost, 0 hung, 1 wrong" in text
    assert "| host, killed | 3 | 2 | 0 | 0.40 | 0.50 | 1 | 0 | 0 |" in text
    assert "| gloo, slow | 1 | 0 | 0 |  |  | 0 | 0 | 1 |" in text
    assert "| gather | 2/3, 0.40, 0.50 |" in text
    assert "| memory | 3 KiB | 8 KiB |" in text
    counted = [
        {"environment": soak["environment"],
         "figures": [{"name": f"x over {wire}: tried", "value": n, "unit": "cases", "limit": None}]}
        for n, wire in ((1, "host"), (2, "gloo"))
    ]  # fmt: skip
    text = page(RUN, rows, {f"disagreement-{i}": facts for i, facts in enumerate(counted)})
    assert "`make soak`, on this one:\n\n|  | host | gloo |\n" in text
    assert "| tried, cases | 1 | 2 |" in text


def test_results_are_read_as_they_were_written(tmp_path) -> None:
    rows = [Tried("gather", "host", "killed", "before", "detected", (0.1, 0.3))]
    write(tmp_path / "a" / "chaos.jsonl", RUN, rows)
    assert read(tmp_path / "a" / "chaos.jsonl") == (RUN, rows)
