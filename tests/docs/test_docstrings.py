"""The site warns of public names, arguments and results that their docstrings do not describe."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

griffe: Any = pytest.importorskip("griffe", reason="griffe is not installed: make docs")
griffe_docstrings: Any = import_module("docs.griffe_docstrings")

SAMPLE = '''
def nothing(): ...

def described(x: int, *rest: int) -> int:
    """Add ``x`` and ``rest``."""

def listed(x: int, y: int, z: int, w: int) -> int:
    """Add.

    Args:
        x ... z: numbers.

    Raises:
        ValueError: they are too large.
    """

def empty(x: int) -> None:
    """Keep.

    Args:
        x:
    """

class Base:
    """A number, see :func:`described`.

    Args:
        x, y: its parts.
    """

    def __init__(self, x: int, y: int, *, z: int = 0) -> None: ...

    def add(self, number: int) -> int:
        """Add to it."""

class Other(Base):
    pass

class Pair:
    """Two numbers.

    Attributes:
        left, right: the numbers.
    """

    def __init__(self, left: int, right: int) -> None: ...

value = 1
'''
GAPS = {
    "nothing": ["has no docstring"],
    "described": [],
    "listed": ["argument w is not described", "what it returns is not described"],
    "empty": ["x has no description"],
    "Base": ["argument z is not described", "Base.add: argument number is not described"],
    "Other": ["argument z is not described"],
    # Griffe takes the second name for the type of the first.
    "Pair": ["argument left is not described", "argument right is not described"],
    "value": ["has no docstring"],
}


def test_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(f"::: sample.{name}" for name in GAPS), encoding="utf-8")
    monkeypatch.setattr(griffe_docstrings, "PAGES", tmp_path)
    (tmp_path / "sample.py").write_text(SAMPLE, encoding="utf-8")
    extensions = griffe.load_extensions(griffe_docstrings.Docstrings)
    with caplog.at_level(logging.WARNING):
        sample = griffe.load("sample", search_paths=[tmp_path], extensions=extensions)
    for name, gaps in GAPS.items():
        found = [text for text in caplog.messages if text.startswith(f"page.md: sample.{name}")]
        assert len(found) == len(gaps), found
        assert all(text.endswith(gap) for text, gap in zip(found, gaps, strict=True)), found
    assert len(caplog.messages) == sum(map(len, GAPS.values()))
    assert "A number, see `described`." in sample["Other"].docstring.value
