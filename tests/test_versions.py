"""The versions of torch that gpudist supports are the same everywhere."""

from __future__ import annotations

import re

import pytest

from gpudist.world.environment import TESTED_TORCH, is_tested
from tests.compatibility import ROOT, oldest_allowed

OLDEST, NEWEST = TESTED_TORCH


def text(name: str) -> str:
    """A page without its line breaks."""
    return " ".join((ROOT / name).read_text().split())


def test_the_oldest_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    assert oldest_allowed(text("pyproject.toml")) == OLDEST


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_state_the_range(page: str) -> None:
    stated = re.findall(r"torch (\d+\.\d+) or later", text(page))
    assert stated == [OLDEST]
    assert set(re.findall(r"(\d+\.\d+) (?:to|and with) (\d+\.\d+)", text(page))) >= {TESTED_TORCH}


def test_the_torch_of_development_is_in_the_range() -> None:
    (pinned,) = re.findall(r"torch==(\S+)", text("constraints.txt"))
    assert is_tested(pinned)


@pytest.mark.parametrize(
    ("version", "within"),
    [
        (f"{OLDEST}.0", True),
        (f"{NEWEST}.1+cu132", True),
        ("2.10.0", False),
        ("3.0.0a0+git1234567", False),
    ],
)
def test_range(version: str, within: bool) -> None:
    assert is_tested(version) is within
