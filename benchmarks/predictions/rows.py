"""Published measurements, as ``rows.json`` keeps them, and the profiles of their machines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gpudist.planning import Profile, profile_of

HERE = Path(__file__).resolve().parent
ROWS, PROFILES = HERE / "rows.json", HERE / "profiles"
SOURCES = PROFILES / "sources.json"
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "GB/s": 1e9, "times": 1.0}


@dataclass(frozen=True)
class Measured:
    """A published measurement.

    Attributes:
        name: name of the row.
        kind: kind of work, a key of :data:`benchmarks.predictions.work.WORKS`, or ``"ratio"``.
        measured: published value; the typical one if there are several.
        unit: unit of the values, a key of ``UNITS``.
        source: page or file that published it.
        profile: name of the machine's profile in ``profiles/``.
        low, high: smallest and largest published value.
        within: largest relative error that counts as reached; ``None`` without a goal.
        is_traced: whether the page of the source was found.
        is_like: whether the planned work is the measured one, and not a stand-in.
        of: for a ratio, the names of two rows.
        work: arguments of the work.
    """

    name: str
    kind: str
    measured: float
    unit: str
    source: str
    profile: str
    low: float
    high: float
    within: float | None
    is_traced: bool
    is_like: bool
    of: tuple[str, ...]
    work: dict[str, Any]


def read_rows(path: Path = ROWS) -> list[Measured]:
    """Return the rows of a file, in its order."""
    return [_row(fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def machine(name: str) -> Profile:
    """Return a profile from ``profiles/``."""
    return profile_of(PROFILES / f"{name}.json")


def profiles_digest(folder: Path = PROFILES) -> str:
    """Return a digest of the profiles, whose figures do not change after the first prediction."""
    digest = sha256()
    for path in sorted(folder.glob("*.json")):
        if path != SOURCES:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _row(fields: dict[str, Any]) -> Measured:
    rest = dict(fields)
    value = rest.pop("measured")
    known = {key: rest.pop(key) for key in ("name", "kind", "unit", "source")}
    return Measured(
        **known,
        measured=value,
        profile=rest.pop("profile", ""),
        low=rest.pop("low", value),
        high=rest.pop("high", value),
        within=rest.pop("within", None),
        is_traced=rest.pop("is_traced", True),
        is_like=rest.pop("is_like", True),
        of=tuple(rest.pop("of", ())),
        work=rest,
    )
