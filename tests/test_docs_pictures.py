"""The script that makes the pictures of the docs still runs, and makes those that are shown."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    found = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
    assert found is not None and found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["make_pictures.py", str(tmp_path)])
    script.main()
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in (DOCS / "pictures").iterdir()}
    for path in tmp_path.iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_every_picture_is_shown() -> None:
    pages = [(DOCS / name).read_text() for name in ("pictures.md", "planning.md")]
    shown = re.findall(r"!\[[^]]+\]\(pictures/([^)]+)\)", "".join(pages))
    assert sorted(shown) == sorted(path.name for path in (DOCS / "pictures").iterdir())
