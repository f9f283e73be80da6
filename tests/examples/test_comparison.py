"""Verdicts on an example that ran distributed and sequentially."""

from __future__ import annotations

import math

import pytest

from tests.examples import trainers

trainers.needs()


def test_any_value_that_differs_too_much_is_a_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdict = trainers.module("comparison").verdict
    ours, theirs = {"loss": [1.0, 0.5], "dice": [0.5]}, {"loss": [1.2, 0.5], "dice": [0.5]}
    assert verdict(ours, ours, 0.0) == verdict(ours, None, 0.0) == []
    assert verdict(ours, theirs, 0.3) == []
    assert verdict(ours, theirs, 0.1) == ["loss differs by 2.0e-01, more than 0.1"]
    assert verdict({**ours, "dice": [math.nan]}, ours, 1.0) == ["dice differs by inf, more than 1"]
    assert "0.500000" in capsys.readouterr().out
    with pytest.raises(ValueError, match="longer"):
        verdict({"loss": [1.0]}, {"loss": [1.0, 2.0]}, 1.0)
