"""Rows with memory, or with the reason why a peer has no time; and whether they reach the goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.beside.work import GOALS, Goal
from benchmarks.case import Case
from benchmarks.files import ENVIRONMENT, BadFile, lines_of
from benchmarks.measure import Series
from benchmarks.rows import CEILINGS, Row, row

HEADING = ("case", "ranks", "peer", "time", "peer", "ratio", "memory", "peer", "ratio", "goal")


@dataclass(frozen=True)
class BesideRow(Row):
    """Row of a result file.

    Attributes:
        peak_mib, peer_peak_mib: largest memory of a rank in a step or a call, above that before the
            case; ``None`` if it was not measured.
        verdict: why the peer has no time; empty if it has.
    """

    peak_mib: float | None
    peer_peak_mib: float | None
    verdict: str

    @property
    def memory_ratio(self) -> float | None:
        if self.peak_mib is None or self.peer_peak_mib is None:
            return None
        return self.peak_mib / self.peer_peak_mib

    @property
    def goal(self) -> Goal | None:
        """The goal against this peer; ``None`` if it is a bound or has no time."""
        if self.ratio is None or self.peer in CEILINGS:
            return None
        (work,) = (work for work in GOALS if self.case.startswith(work))
        return GOALS[work]

    @property
    def missed(self) -> list[str]:
        """Names of the ratios above the goal: time, memory."""
        goal = self.goal
        if goal is None or self.ratio is None:
            return []
        found = ["time"] * (self.ratio > goal.time)
        memory = self.memory_ratio
        if goal.memory is not None and memory is not None and memory > goal.memory:
            found.append("memory")
        return found


def timed(case: Case, mine: Series, peer: Series, peaks: dict[str, float]) -> BesideRow:
    """Return the row of a peer; without its time if its last result was wrong."""
    if not peer.correct:
        return untimed(case, mine, peer.name, "silently wrong after the first step", peaks)
    found = row(case, "", mine.us, mine.correct, peer.name, peer.us)
    return BesideRow(**asdict(found), **_memory(peaks, mine.name, peer.name), verdict="")


def untimed(
    case: Case, mine: Series, peer: str, verdict: str, peaks: dict[str, float]
) -> BesideRow:
    """Return the row of a peer that gets no time."""
    found = {**asdict(row(case, "", mine.us, mine.correct)), "peer": peer}
    return BesideRow(**found, **_memory(peaks, mine.name, ""), verdict=verdict)


def _memory(peaks: dict[str, float], mine: str, peer: str) -> dict[str, Any]:
    return {"peak_mib": peaks.get(mine), "peer_peak_mib": peaks.get(peer)}


def read(path: Path) -> tuple[dict[str, Any], list[BesideRow]]:
    """Return the environment and the rows of a file.

    Raises:
        BadFile: the file does not begin with an environment, or another line is not a row.
    """
    (_, first), *rest = lines_of(path)
    names = [field.name for field in fields(BesideRow)]
    if ENVIRONMENT not in first:
        raise BadFile(f"{path}: does not begin with an environment")
    for place, line in rest:
        if set(line) != set(names):
            raise BadFile(f"{place}: not a row of benchmarks.beside")
    return first[ENVIRONMENT], [BesideRow(**line) for _, line in rest]


def cells(found: BesideRow) -> tuple[str, ...]:
    """Return a row under ``HEADING``."""
    memory = found.memory_ratio
    goal = found.verdict or ("reached" if found.goal is not None else "")
    if found.goal is None and not found.verdict:
        goal = "a bound"
    if found.missed:
        goal = f"missed: {', '.join(found.missed)}"
    return (
        found.case,
        str(found.ranks),
        found.peer,
        _time(found.us_median),
        _time(found.peer_us_median),
        _number(found.ratio, ".2f"),
        _number(found.peak_mib, ".0f", " MiB"),
        _number(found.peer_peak_mib, ".0f", " MiB"),
        _number(memory, ".2f"),
        goal,
    )


def _time(us: float | None) -> str:
    if us is None or us < 1000:
        return _number(us, ".0f", " us")
    return _number(us / 1000, ".1f", " ms")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def summary(rows: Sequence[BesideRow]) -> str:
    """Return how many goals are reached, of how many."""
    with_goal = [each for each in rows if each.goal is not None]
    missed = [each for each in with_goal if each.missed]
    return f"{len(with_goal) - len(missed)} of {len(with_goal)} rows with a goal reach it."
