"""Random modules, or the small forwards on all their grids, converted and judged.

``python -m tests.hazards --count 2000 --seed 1``

Each wrong result is printed with its seed and its source, reduced to few operations. The exit
status is 1 if anything is wrong, or fails other than by a clear refusal.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from tests.hazards.forwards import ENTRIES
from tests.hazards.judge import Verdict, judge
from tests.hazards.plans import judged, plan_for
from tests.hazards.random_modules import Case, draw, shrunk
from tests.pool import close_pool

T = TypeVar("T")


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    if options.case is not None:
        case = draw(options.seed, options.case, options.idioms)
        verdict = case.judge()
        print(f"{case}\n{verdict}")
        return verdict.how in ("wrong", "failed")
    if options.forwards:
        try:
            return _forwards(options.only)
        finally:
            close_pool()
    numbers = range(options.first, options.first + options.count)
    return _random(options.seed, numbers, options.idioms, options.plans)


def _random(seed: int, numbers: range, idioms: int, with_plans: bool = False) -> int:
    found: Counter[str] = Counter()
    pinned: Counter[str] = Counter()
    reasons: dict[str, list[str]] = {}
    for number in _with_progress(numbers):
        case = draw(seed, number, idioms)
        if with_plans:
            verdict, kinds = judged(case)
            pinned += kinds
        else:
            verdict = case.judge()
        found[verdict.how] += 1
        if verdict.how == "refused":
            reasons.setdefault(_without_numbers(verdict.text), []).append(case.name)
        elif verdict.how != "right":
            _report(case, verdict, with_plans)
    if pinned:
        print("pinned:", ", ".join(f"{count} {kind}" for kind, count in sorted(pinned.items())))
    if reasons:
        print("refused:")
    for text, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):6d} {text}\n       {', '.join(names[:8])}")
    print(_summary(found, "random modules"))
    return 1 if found["wrong"] or found["failed"] else 0


def _report(case: Case, verdict: Verdict, with_plan: bool) -> None:
    if with_plan:
        text = f"{verdict.how}: {case.name}: {verdict.text}\n{plan_for(case)[0]}\n{case}\n"
        print(text, flush=True)
        return
    small = shrunk(case, lambda candidate: candidate.judge().how == verdict.how)
    print(f"{verdict.how}: {case.name}: {verdict.text}\n{small}\n", flush=True)


def _forwards(only: Sequence[str]) -> int:
    """Every small forward on every one of its grids."""
    found: Counter[str] = Counter()
    unexpected = 0
    tried = [
        (entry, grid)
        for name, entry in ENTRIES.items()
        for grid in entry.all_grids()
        if not only or name in only
    ]
    for entry, grid in _with_progress(tried):
        verdict = judge(entry, grid, transport="host" if entry.processes else "loopback")
        found[verdict.how] += 1
        if verdict.how not in entry.allowed:
            unexpected += 1
            print(f"{entry.name} on {list(grid)}: {verdict}", flush=True)
    print(_summary(found, "forwards on a grid"))
    return 1 if unexpected else 0


def _summary(found: Counter[str], what: str) -> str:
    kinds = ("right", "wrong", "refused", "failed")
    return f"{found.total()} {what}: " + ", ".join(f"{found[how]} {how}" for how in kinds)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)[:200]


def _with_progress(items: Sequence[T]) -> Iterator[T]:
    """The items; a bar on a terminal, if there is rich."""
    try:
        from rich.progress import track
    except ImportError:
        yield from items
        return
    shown: Iterable[T] = items
    if sys.stderr.isatty():
        from rich.console import Console

        shown = track(items, "judging", console=Console(stderr=True), transient=True)
    yield from shown


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hazards", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many random modules")
    parser.add_argument("--seed", type=int, default=1, help="the same ones for the same seed")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--case", type=int, help="this one alone, with its source")
    parser.add_argument(
        "--idioms", type=int, default=0, metavar="N",
        help="modules with at least N idioms of hand-written forwards: hooks, early returns, ...",
    )  # fmt: skip
    parser.add_argument(
        "--plans", action="store_true", help="each module under a plan with at least 3 pins"
    )
    parser.add_argument("--forwards", action="store_true", help="small forwards, on all grids")
    parser.add_argument("--only", nargs="*", default=(), help="names of forwards")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
