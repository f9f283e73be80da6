"""Public names, their signatures, and what layers print and store are those of ``surface.txt``."""

from __future__ import annotations

from tests.surface import FILE, surface


def test_the_surface_is_as_written() -> None:
    before, now = FILE.read_text(encoding="utf-8").splitlines(), list(surface())
    changed = {"removed": sorted(set(before) - set(now)), "added": sorted(set(now) - set(before))}
    assert before == now, f"{changed}; if it is meant, run python -m tests.surface"
