"""A picture of a plan names its layouts, and shows along which axes tensors are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudist import Plan
from gpudist.cli import main
from gpudist.pictures.layouts import layouts_panel
from gpudist.pictures.page import figure_of
from gpudist.sbp import broadcast, partial_sum, split


def test_a_line_for_each_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan()
    plan.layout("down.2", [split(0), broadcast], at="input", grid=[2, 2])
    plan.layout("", partial_sum, function="cat", call=1, grid=[4])
    (axes,) = figure_of([layouts_panel(plan)], "Layouts").axes
    words = [text.get_text() for text in axes.texts]
    assert words == ["down.2, input", "dim 0", "whole", "the network, cat, call 1, output", "sum"]
    assert len(axes.patches) == 3
    plan.save(tmp_path / "plan.json")
    picture = tmp_path / "plan.svg"
    assert main(["draw", "--plan", str(tmp_path / "plan.json"), "-o", str(picture)]) == 0
    assert capsys.readouterr().out.split() == ["picture", str(picture), "layouts", "2"]
    assert picture.stat().st_size > 0
