"""The numbers of docs/global_tensors.md are current."""

from __future__ import annotations

from tests.docs.pages import ROOT
from tests.sbp.boxing_table import table


def test_the_boxings_are_those_of_now() -> None:
    assert table() in (ROOT / "docs" / "global_tensors.md").read_text(encoding="utf-8")
