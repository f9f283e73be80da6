"""World without torch or MPI, whose sides behave as their parameters prescribe."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from benchmarks.case import Case, Side
from benchmarks.service import serve
from benchmarks.worlds import Launch


def launch(ranks: int) -> Launch:
    return Launch("fake", [sys.executable, "-m", __name__, str(ranks)], {})


def case(sides: dict[str, dict[str, Any]], ranks: int = 2) -> Case:
    """Return a case with these sides, each given as the options of :func:`side`."""
    return Case("fake", "a case", ranks, 8, {"sides": sides})


def side(rank: int, ms: float | list[float], wrong: bool = False, dies: bool = False) -> Side:
    """Sleeps ``ms`` a call, or a list of them by rank; may be wrong, or die, on rank 1."""

    def call() -> None:
        if dies and rank == 1:
            print("rank 1 is about to die", flush=True)
            os._exit(3)
        time.sleep((ms[rank] if isinstance(ms, list) else ms) / 1e3)

    return Side(call, lambda _: not (wrong and rank == 1))


def main(ranks: int, address: str) -> None:
    rank, children = 0, list[int]()
    for number in range(1, ranks):
        child = os.fork()
        if child == 0:
            rank, children = number, []
            break
        children.append(child)
    serve(
        address, rank, {"fake": "1"}, lambda: None,
        lambda case: {name: side(rank, **how) for name, how in case.parameters["sides"].items()},
    )  # fmt: skip
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
