"""The page of predicted memory is that of its files, and a prediction is made as it was."""

from __future__ import annotations

import json

from benchmarks.memory.__main__ import predicted
from benchmarks.memory.page import HERE, PAGE, page


def test_the_page_is_that_of_its_files() -> None:
    assert page() == PAGE.read_text(), "write it again: python -m benchmarks.memory page"


def test_predictions_are_those_committed() -> None:
    committed = json.loads((HERE / "predicted.json").read_text())
    for name, one in predicted([]):
        assert one == committed[name]
