"""The script for the pictures of the docs makes all committed pictures, and all are shown."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
SHOWN = re.compile(r"!\[[^]]+\]\((?:\.\./)?pictures/([^)]+)\)")


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
    """Partitions of 2, of 4 and of 64 ranks among them."""
    pages = (page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    shown = {name for page in pages for name in SHOWN.findall(page)}
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}
    assert {re.sub(r"\D", "", name) for name in shown} == {"2", "4", "64"}
