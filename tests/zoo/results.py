"""Verdicts on disk, and the table of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.zoo.judge import Mode, Verdict

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "zoo"
# They show or test verdicts, and do not decide them.
_ABOUT_VERDICTS = ("page.py", "page.md", "RESULTS.md", "test_zoo.py")
# How many networks may be refused.
REFUSED_AT_MOST = 4
_ORDER = ("wrong", "failed", "refused", "right")


def code_version() -> str:
    """Digest of gpudist and the zoo: verdicts on other code are made again."""
    judge = [file for file in ROOT.glob("tests/zoo/*") if file.name not in _ABOUT_VERDICTS]
    files = [*ROOT.glob("gpudist/**/*.py"), *ROOT.glob("gpudist/*.so"), *judge]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def keep(verdict: Verdict, version: str) -> None:
    """Append it to the file of its mode."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _file(verdict.mode).open("a") as file:
        file.write(json.dumps({"version": version, **asdict(verdict)}) + "\n")


def kept(mode: Mode, version: str) -> dict[tuple[str, str], Verdict]:
    """Return the last verdict of each network and grid for this code."""
    found: dict[tuple[str, str], Verdict] = {}
    lines = _file(mode).read_text().splitlines() if _file(mode).exists() else []
    for line in lines:
        row = json.loads(line)
        if row.pop("version") == version:
            found[row["name"], row["grid"]] = Verdict(**row)
    return found


def verdict_of(verdicts: Iterable[Verdict]) -> str:
    """Return the worst of a network's verdicts on its grids."""
    return min((each.verdict for each in verdicts), key=_ORDER.index)


def passes(verdicts: Sequence[Verdict]) -> bool:
    """Return whether nothing is wrong or planned wrongly, and at most four are not right."""
    if any(v.planned_bytes != v.forward_bytes for v in verdicts):
        return False
    worst = Counter(verdict_of(these) for these in _by_network(verdicts).values())
    return not worst["wrong"] and sum(worst.values()) - worst["right"] <= REFUSED_AT_MOST


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a row for each package, with the networks that are not right."""
    networks = _by_network(verdicts)
    packages = list(dict.fromkeys(name.partition("/")[0] for name in networks))
    rows = [["package", *reversed(_ORDER), "worst error of right ones", "seconds", "MB sent"]]
    for package in [*packages, ""]:
        these = {n: v for n, v in networks.items() if n.startswith(f"{package}/") or not package}
        count = Counter(verdict_of(v) for v in these.values())
        each = [v for of_network in these.values() for v in of_network]
        right = [v.error for v in each if v.verdict == "right"]
        rows.append(
            [
                package or "all",
                *(str(count[kind]) for kind in reversed(_ORDER)),
                f"{max(right):.1e}" if right else "-",
                f"{sum(v.seconds + v.alone_seconds for v in each):.0f}",
                f"{sum(v.sent_bytes for v in each) / 1e6:.1f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines += [f"{v.name} on {v.grid}: {described(v)}" for v in verdicts if v.verdict != "right"]
    lines += [
        f"{v.name} on {v.grid}: {v.forward_bytes} bytes sent in a forward, planned: "
        f"{'not, since values decide' if v.planned_bytes is None else v.planned_bytes}"
        for v in verdicts
        if v.verdict in ("right", "wrong") and v.planned_bytes != v.forward_bytes
    ]
    return "\n".join(line.rstrip() for line in lines)


def described(verdict: Verdict) -> str:
    """A line about it."""
    if verdict.verdict in ("right", "wrong"):
        return f"{verdict.verdict}, error {verdict.error:.1e}, {verdict.what}"
    return f"{verdict.verdict}, {verdict.text.strip().splitlines()[-1][:400]}"


def _by_network(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.name, []).append(verdict)
    return found


def _file(mode: Mode) -> Path:
    return FOLDER / f"{mode}.jsonl"
