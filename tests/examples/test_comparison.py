"""Verdicts on an example that ran distributed and sequentially."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the example prints with rich: pip install 'gpudist[examples]'")


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    return importlib.import_module("comparison").verdict


def test_any_value_that_differs_too_much_is_a_difference(
    verdict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = {"loss": [1.0, 0.5], "dice": [0.5]}, {"loss": [1.2, 0.5], "dice": [0.5]}
    assert verdict(ours, ours, 0.0) == verdict(ours, None, 0.0) == []
    assert verdict(ours, theirs, 0.3) == []
    assert verdict(ours, theirs, 0.1) == ["loss differs by 2.0e-01, more than 0.1"]
    assert verdict({**ours, "dice": [math.nan]}, ours, 1.0) == ["dice differs by inf, more than 1"]
    assert "0.500000" in capsys.readouterr().out


def test_series_of_other_lengths_are_an_error(verdict: Any) -> None:
    with pytest.raises(ValueError, match="longer"):
        verdict({"loss": [1.0]}, {"loss": [1.0, 2.0]}, 1.0)
