"""The page of reliability counts what is bad."""

from __future__ import annotations

from tests.faults.chaos.experiment import DEADLINE_S, cells
from tests.faults.chaos.results import Run, Tried
from tests.faults.report import page

RUN = Run("2026-01-02", 1, DEADLINE_S, 2, "x86_64", "2.13")


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
    assert f"in 3 of {len(list(cells()))}\ncombinations" in text
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
