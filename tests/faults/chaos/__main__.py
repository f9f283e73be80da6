"""Strike ranks of every operator, over every transport, at every point of a movement.

``python -m tests.faults.chaos --count 2000 --seed 1 --minutes 15``

Exits with 1 if a failure was lost, hung, gave wrong numbers, was detected late, did not name the
rank and the operation, or left something behind.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tests.doubles import use_doubles
from tests.faults.chaos.experiment import Cell, Experiment, cells, experiments
from tests.faults.chaos.judge import BAD, Verdict, conduct


def main() -> int:
    options = _options()
    use_doubles()
    chosen = list(_chosen(options))
    count = options.count or len(chosen)
    counts: Counter[str] = Counter()
    started = itertools.islice(experiments(options.seed, chosen), count)
    for tried, verdict in _conducted(started, count, options):
        counts[verdict.how] += 1
        if verdict.how in BAD:
            print(f"{verdict.how}: {tried.words()}\n  {verdict.text}", flush=True)
    bad = sum(counts[how] for how in BAD)
    print(f"{counts.total()} of {count} experiments, {bad} bad: {dict(counts)}")
    return 1 if bad else 0


def _conducted(
    started: Iterator[Experiment], count: int, options: argparse.Namespace
) -> Iterator[tuple[Experiment, Verdict]]:
    """Run experiments side by side, since most of them wait; start none after the time limit."""
    from tests.progress import shown

    deadline_s = time.monotonic() + 60.0 * options.minutes
    running: dict[Future[Verdict], Experiment] = {}
    with ThreadPoolExecutor(options.jobs) as pool, shown(count) as advance:
        while True:
            while len(running) < options.jobs and time.monotonic() < deadline_s:
                tried = next(started, None)
                if tried is None:
                    break
                running[pool.submit(conduct, tried)] = tried
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                advance()
                yield running.pop(future), future.result()


def _chosen(options: argparse.Namespace) -> Iterator[Cell]:
    wanted = (options.operator, options.transport, options.fault, options.point)
    for cell in cells():
        if all(not names or name in names for names, name in zip(wanted, cell, strict=True)):
            yield cell


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=0, help="how many experiments; each cell once")
    parser.add_argument("--seed", type=int, default=1, help="the same ones for the same seed")
    parser.add_argument("--minutes", type=float, default=15.0, help="begin none after so long")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    for name in ("operator", "transport", "fault", "point"):
        parser.add_argument(f"--{name}", action="append", help="only this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
