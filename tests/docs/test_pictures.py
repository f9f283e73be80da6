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
FIRST = "halo-4.svg"
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


@pytest.mark.parametrize("name", [path.name for path in (DOCS / "pictures").iterdir()])
def test_labels_can_be_read(name: str) -> None:
    """Labels of the first page's picture are 11 px or more at 700 px, and 7.5 px on a phone."""
    text = (DOCS / "pictures" / name).read_text(encoding="utf-8")
    (width_pt,) = re.findall(r'<svg [^>]*width="([\d.]+)pt"', text)
    # A text's paths have 100 units per size.
    smallest_pt = min(100 * float(size) for size in re.findall(r"scale\(([\d.]+) -", text))
    is_first = name == FIRST
    assert 700 / float(width_pt) * smallest_pt >= (11 if is_first else 8)
    assert 358 / float(width_pt) * smallest_pt >= (7.5 if is_first else 4)


def test_every_picture_is_shown() -> None:
    pages = (page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    shown = {name for page in pages for name in SHOWN.findall(page)}
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}
