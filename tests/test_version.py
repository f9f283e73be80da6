"""Ranks with different versions of the library are told so when they meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import gpudist
from gpudist import version
from gpudist.errors import CollectiveTimeout, PlanMismatch
from gpudist.runtime import connect
from gpudist.version import Versions

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def test_one_version() -> None:
    assert f'\nversion = "{gpudist.__version__}"\n' in PROJECT.read_text(encoding="utf-8")


def said(monkeypatch: pytest.MonkeyPatch, store: dist.Store, *versions: str) -> list[Versions]:
    """Of ranks with these versions, as they meet in one store."""
    found = []
    for rank, text in enumerate(versions):
        monkeypatch.setattr(version, "__version__", text)
        found.append(Versions(store, "world", rank, len(versions)))
    return found


def test_equal_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for mine in said(monkeypatch, store, "0.1.0", "0.1.0"):
        mine.compare(store)


def test_different_versions_are_shown_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    store, texts = dist.HashStore(), []
    for mine in said(monkeypatch, store, "0.1.0", "0.2.0", "0.1.0"):
        with pytest.raises(PlanMismatch) as caught:
            mine.compare(store)
        texts.append(str(caught.value))
    assert set(texts) == {
        "ranks disagree about the library:\n"
        "  rank 0: gpudist 0.1.0\n  rank 1: gpudist 0.2.0\n  rank 2: gpudist 0.1.0\n"
        "install the same gpudist on every node"
    }


@pytest.mark.parametrize(("theirs", "kind"), [("0.2.0", PlanMismatch), ("", CollectiveTimeout)])
def test_a_rank_that_cannot_connect_looks_for_other_versions(
    monkeypatch: pytest.MonkeyPatch, theirs: str, kind: type[Exception]
) -> None:
    """What they say at the meeting may differ with the version, so that they miss each other."""
    store = dist.HashStore()
    if theirs:
        store.set("world/version/1", theirs)
    with pytest.raises(kind):
        connect("gloo", store, 0, 2, 0.3, "world")
