"""A picture of a plan names its layouts, and shows along which axes tensors are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpudist import Plan
from gpudist.cli import main
from gpudist.convert.network_plan import Stretch
from gpudist.pictures.layouts import layouts_panel, stretches_panel
from gpudist.pictures.page import figure_of
from gpudist.sbp import broadcast, partial_sum, split


def test_a_line_for_each_stretch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = Stretch("down.0 (conv3d)", "pool (max_pool3d)", 14, {2: False, 3: False}, 0)
    second = Stretch("head (conv3d)", "head (conv3d)", 1, {2: True, 3: False}, 3 << 20)
    plan = Plan(grid=(1, 1, 2, 4, 1), stretches=[first, second])
    assert Plan.from_text(plan.to_text()) == plan
    (axes,) = figure_of([stretches_panel(plan)], "").axes
    assert [text.get_text() for text in axes.texts][-8:] == [
        "down.0 (conv3d)\nto pool (max_pool3d)\n14 functions",
        "split\naxis 2", "split\naxis 3", "moves\nnothing",
        "head (conv3d)", "whole\naxis 2", "split\naxis 3", "moves\n3.15MB",
    ]  # fmt: skip
    colors = [patch.get_facecolor() for patch in axes.patches]
    assert colors[0] == colors[1] == colors[3] != colors[2]
    plan.save(tmp_path / "plan.json")
    picture = tmp_path / "plan.svg"
    assert main(["draw", "--plan", str(tmp_path / "plan.json"), "-o", str(picture)]) == 0
    assert "max_pool3d" in picture.read_text(encoding="utf-8")


def test_a_line_for_each_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan()
    plan.layout("down.2", [split(0), broadcast], at="input", grid=[2, 2])
    plan.layout("", partial_sum, function="cat", call=1, grid=[4])
    (axes,) = figure_of([layouts_panel(plan)], "").axes
    words = [text.get_text() for text in axes.texts][-5:]
    assert words == ["down.2, input", "dim 0", "whole", "the network, cat, call 1, output", "sum"]
    assert len(axes.patches) == 3
    plan.save(tmp_path / "plan.json")
    picture = tmp_path / "plan.svg"
    assert main(["draw", "--plan", str(tmp_path / "plan.json"), "-o", str(picture)]) == 0
    assert capsys.readouterr().out.split() == ["picture", str(picture), "layouts", "2"]
    assert picture.stat().st_size > 0
