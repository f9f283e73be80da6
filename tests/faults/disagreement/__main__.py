"""Run every operator with every disagreement over every transport; report what was detected.

``python -m tests.faults.disagreement``
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter

from gpudist.testing.rank_pool import RankPool
from gpudist.transport import TRANSPORTS
from tests.doubles import use_doubles
from tests.faults.disagreement.acts import AGREED, KINDS, NAMES, ranks_of
from tests.faults.disagreement.run import every_rank, verdict
from tests.faults.figures import Figure
from tests.progress import shown

# What no disagreement may end in has a limit of none.
VERDICTS = {
    "detected": None,
    "refused": None,
    "harmless": None,
    "at the deadline": None,
    "wrong": 0.0,
}


def figures(transport: str, wait_s: float) -> list[Figure]:
    pools: list[RankPool] = []

    @functools.cache
    def pool() -> RankPool:
        pools.append(RankPool(max(map(ranks_of, NAMES)), wait_s))
        return pools[0]

    if transport == "nccl":
        use_doubles()
    tried = [(name, kind) for name in NAMES for kind in KINDS if (name, kind) not in AGREED]
    counts: Counter[str] = Counter()
    slowest_s = 0.0
    with shown(len(tried)) as advance:
        for number, (name, kind) in enumerate(tried):
            odd = number % ranks_of(name)
            told = every_rank(pool, transport, name, kind, odd)
            found = verdict(told, odd, kind)
            counts[found if found in VERDICTS else "wrong"] += 1
            if found not in VERDICTS:
                print(f"{transport}: {name}, another {kind}, on rank {odd}: {found}", flush=True)
            if found == "detected":
                slowest_s = max(slowest_s, *(each.seconds for each in told))
            advance()
    for each in pools:
        each.close()
    name = f"disagreements over {transport}"
    return [
        Figure(f"{name}: tried", len(tried), "cases"),
        *[Figure(f"{name}: {key}", counts[key], "cases", most) for key, most in VERDICTS.items()],
        Figure(f"{name}: time to PlanMismatch, largest", round(slowest_s, 3), "s"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.disagreement", description=__doc__
    )
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="this alone")
    parser.add_argument("--wait", type=float, default=10.0, help="deadline of a wait, in seconds")
    options = parser.parse_args()
    over = False
    for transport in options.transport or TRANSPORTS:
        found = figures(transport, options.wait)
        for figure in found:
            print(f"  {figure}", flush=True)
        over |= any(figure.is_over for figure in found)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
