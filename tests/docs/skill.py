"""Run the ten tasks of docs/skill.md, and compare each network with the sequential one.

``python -m tests.docs.skill`` runs every task alone on four workers. It prints the calls that
convert the network, the number of compared tensors and their largest difference.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.docs.pages import ROOT, Block, read

PAGE = "docs/skill.md"
RANKS = 4
LIMIT_S = 120.0
_TITLE = re.compile(r"^### (\d+\. .+)$", re.MULTILINE)
_CALLS = ("P_world.grid(", "gpudist.")


@dataclass(frozen=True)
class Task:
    """Title of a task, the check that all tasks share, and the solution."""

    title: str
    check: Block
    solution: Block

    @property
    def calls(self) -> list[str]:
        """Lines of the solution that call gpudist."""
        lines = self.solution.text.splitlines()
        return [line.strip() for line in lines if any(call in line for call in _CALLS)]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task.

    Attributes:
        differences: largest difference of each compared tensor, on all ranks.
        seconds: seconds of the task.
        error: message of the error that ended the task; ``""`` if it ran to its end.
    """

    differences: tuple[float, ...]
    seconds: float
    error: str

    @property
    def is_right(self) -> bool:
        return not self.error and len(self.differences) >= RANKS

    def __str__(self) -> str:
        if self.error:
            return f"WRONG: {self.error}"
        if not self.is_right:
            return "WRONG: nothing was compared"
        compared = len(self.differences) // RANKS
        return (
            f"{compared} tensors equal the sequential network's, largest difference "
            f"{max(self.differences):.0e}, {self.seconds:.1f} s"
        )


def tasks(page: str = PAGE) -> list[Task]:
    """Read the tasks of a page whose first snippet is the check."""
    check, *solutions = [block for block in read(page).blocks if block.is_snippet]
    titles = _TITLE.findall((ROOT / page).read_text(encoding="utf-8"))
    return [Task(title, check, each) for title, each in zip(titles, solutions, strict=True)]


def execute(P_world: Partition, *blocks: Block) -> dict[str, Any]:
    """Execute blocks one after the other, and return their names."""
    names: dict[str, Any] = {"P_world": P_world, "__name__": "__docs__"}
    for block in blocks:
        exec(block.code("P_world"), names)
    return names


def outcome(task: Task) -> Outcome:
    """Run a task on ``RANKS`` threads."""
    start = time.perf_counter()
    error = ""
    with _differences() as found:
        try:
            run_distributed(execute, RANKS, task.check, task.solution, timeout=LIMIT_S)
        # A wrong solution may raise any exception.
        except Exception as failure:
            error = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    return Outcome(tuple(found), time.perf_counter() - start, error)


@contextmanager
def _differences() -> Iterator[list[float]]:
    """Record the difference of every pair of tensors that ``assert_close`` accepts."""
    compare = torch.testing.assert_close
    found: list[float] = []

    def recorded(actual: torch.Tensor, expected: torch.Tensor) -> None:
        compare(actual, expected)
        found.append(float((actual.detach() - expected.detach()).abs().max()))

    torch.testing.assert_close = recorded
    try:
        yield found
    finally:
        torch.testing.assert_close = compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every task; return 1 if one failed or compared nothing."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.skill", description=__doc__)
    parser.add_argument("--task", type=int, help="number of the only task to run")
    parser.add_argument("--page", default=PAGE, help="page of the same form")
    options = parser.parse_args(arguments)
    chosen = [task for n, task in enumerate(tasks(options.page), 1) if options.task in (None, n)]
    right = 0
    for task in chosen:
        found = outcome(task)
        right += found.is_right
        print(task.title, *(f"    {call}" for call in task.calls), f"  {found}", sep="\n")
    print(f"{right} of {len(chosen)} tasks equal the sequential network")
    return 0 if chosen and right == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
