"""Judge what an assistant made of ten tasks, with docs/skill.md alone to read.

``python -m tests.docs.assistant FOLDER``: the assistant gets the page and the programs in
``tests/docs/assistant/tasks``, and writes for each ``task_NN.py`` a program of the same name in
``FOLDER``. This is started by torchrun on four workers, splits the large tensors, and prints on
rank 0 the same line of numbers. The exit status is 1 unless all are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests import warm
from tests.docs.pages import ROOT
from tests.progress import shown

TASKS = sorted((Path(__file__).parent / "tasks").glob("task_*.py"))
RANKS = 4
LIMIT_S = 300.0
_ERROR = 1e-8
_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")


def verdict(task: Path, solution: Path) -> str:
    """Return ``"right"``, or what is wrong with a solution."""
    if not solution.exists():
        return "missing"
    expected, _ = numbers(task)
    found, error = numbers(*_LAUNCHER, solution)
    if found is None or expected is None:
        return f"no numbers: {error}"
    pairs = [*zip(found, expected, strict=False)]
    is_equal = all(abs(a - b) <= _ERROR * max(1.0, abs(b)) for a, b in pairs)
    if len(found) != len(expected) or not is_equal:
        return f"wrong: {found} in place of {expected}"
    return "right"


def numbers(*program: str | Path) -> tuple[list[float] | None, str]:
    """Return the numbers that a program prints, and its first error."""
    done = subprocess.run(
        [warm.python(), *map(str, program)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("NUMBERS ")]
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return json.loads(lines[0].partition(" ")[2]) if lines else None, "".join(errors[:1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.assistant",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of the solutions")
    parser.add_argument("--task", type=int, help="judge this task alone")
    options = parser.parse_args(arguments)
    chosen = TASKS if options.task is None else [TASKS[options.task - 1]]
    right = 0
    with shown(len(chosen)) as advance:
        for task in chosen:
            found = verdict(task, options.folder / task.name)
            right += found == "right"
            print(f"{task.stem}: {found}", flush=True)
            advance()
    print(f"{right} of {len(chosen)} solutions equal the sequential program")
    return int(right < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
