"""The blocks of docs/planning.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("".join(blocks), names)
    assert len(blocks) == 2
    assert len(names["best"].grid) == 5
    assert (tmp_path / "profile.json").exists()
