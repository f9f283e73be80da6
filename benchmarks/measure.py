"""Measure a case: its sides, which may belong to different worlds, take turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.case import Case
from benchmarks.rows import MEMORY_COPY, Row, row
from benchmarks.worlds import MPI_NAMES, Pages, World

ITERATIONS = 30
ROUNDS = 10
# Least time of an iteration of all sides, and of the fastest one, reached by many calls if
# necessary: ranks leave a barrier tens of microseconds apart.
ALL_US, FASTEST_US = 20_000.0, 300.0
MAX_CALLS = 256
WARM_UP_TURNS = 16
TURNS_WITHOUT_NEW_PAGES = 3
FEW_PAGES = 64
SHORT_US = 1000.0
# If an iteration of all sides takes longer than this, only the least number is measured.
LONG_US, LEAST_ITERATIONS = 3e5, 20


@dataclass
class Series:
    """Measurements of one side: microseconds a call, one number per iteration."""

    name: str
    us: list[float] = field(default_factory=list)
    correct: bool = True

    @property
    def is_bare(self) -> bool:
        """Whether results go into existing memory."""
        return self.name.endswith(" bare") or self.name == MEMORY_COPY


def measure(case: Case, worlds: Sequence[World], iterations: int, pages: Pages) -> list[Series]:
    """Return the series of all sides, ours first; results are checked before and after."""
    turns = [
        (world, Series(name))
        for world in worlds
        for name in world.prepare(case)
        if pages.recycled or not Series(name).is_bare
    ]
    for world, series in turns:
        series.correct = world.check(series.name)
    until_recycled = pages.recycled and case.has_large_output
    us = [_warm_up(world, series.name, until_recycled) for world, series in turns]
    calls = calls_for(us)
    if sum(us) > LONG_US:
        iterations = min(iterations, LEAST_ITERATIONS)
    rounds = min(ROUNDS, iterations) if len(turns) > 1 else 1
    for number in range(rounds):
        share = iterations // rounds + (number < iterations % rounds)
        first = number % len(turns)
        for world, series in turns[first:] + turns[:first]:
            series.us += world.time(series.name, calls, share).us
    for world, series in turns:
        series.correct = world.check(series.name) and series.correct
    return [series for _, series in turns]


def _warm_up(world: World, name: str, until_recycled: bool) -> float:
    """Call the side until it uses no new pages, up to a limit; return microseconds per call."""
    us, turns_without = 0.0, 0
    for _ in range(WARM_UP_TURNS):
        turn = world.time(name, 1, 1)
        us = turn.us[0]
        turns_without = turns_without + 1 if turn.new_pages < FEW_PAGES else 0
        if not until_recycled or turns_without == TURNS_WITHOUT_NEW_PAGES:
            break
    # The time of a single short call is mostly the skew with which ranks leave a barrier.
    return min(world.time(name, 16, 3).us) if us < SHORT_US else us


def calls_for(us: Sequence[float]) -> int:
    """Return the calls per iteration, equal for all sides, whose calls take ``us`` microseconds."""
    return int(max(1, min(MAX_CALLS, max(ALL_US / sum(us), FASTEST_US / min(us)))))


def rows_of(case: Case, series: Sequence[Series], suffix: str = "") -> list[Row]:
    """Return the rows of a case: ours beside each peer, and beside the better MPI of each kind."""
    mine, *peers = series
    if not peers:
        return [row(case, suffix, mine.us, mine.correct)]
    for kind in (" bare", ""):
        both = [peer for peer in peers if peer.name in [name + kind for name in MPI_NAMES]]
        if len(both) == len(MPI_NAMES):
            best = min(both, key=lambda peer: statistics.median(peer.us))
            peers.append(Series(f"mpi{kind} (best)", best.us, best.correct))
    return [
        row(case, suffix, mine.us, mine.correct and peer.correct, peer.name, peer.us)
        for peer in peers
    ]
