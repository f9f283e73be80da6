"""Find out in ten minutes what works on a GPU: ``python -m tests.gpu.first --out FOLDER``.

Every step runs separately, within its own time limit, even if others failed. The folder receives a
log of each step, NCCL's own log in ``nccl/``, and ``summary.json``. If GPUDIST_DEVICE_LIBRARY names
the doubles, the run is a rehearsal.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.first.runner import Outcome, Place, line_of, run_all
from tests.gpu.first.steps import Step, steps

BUDGET_S = 570.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a step failed or was not done in time."""
    options = _options(arguments)
    if options.list:
        for step in steps():
            print(f"{step.name:<26}{step.limit_s:>5.0f} s  {step.shows}")
        return 0
    rehearsal = os.environ.get("GPUDIST_DEVICE_LIBRARY", "") != ""
    place = Place(
        options.out.resolve(), rehearsal, 0 if rehearsal else _gpus(),
        options.budget or float("inf"), options.nccl, options.pack,
    )  # fmt: skip
    if rehearsal:
        print("a rehearsal over the doubles: nothing here is a result of a GPU", flush=True)
    outcomes = run_all(_chosen(options), place, _say)
    count = {status: 0 for status in ("ok", "failed", "timeout", "skipped")}
    for outcome in outcomes:
        count[outcome.status] += 1
    print(", ".join(f"{number} {status}" for status, number in count.items()), f"; {place.out}")
    return 1 if count["failed"] or count["timeout"] else 0


def _say(outcome: Outcome) -> None:
    print(line_of(outcome), flush=True)


def _chosen(options: argparse.Namespace) -> list[Step]:
    names = [step.name for step in steps()]
    unknown = {*options.only, *filter(None, [options.first])} - {*names}
    if unknown:
        sys.exit(f"error: no step is called {', '.join(sorted(unknown))}; there are {names}")
    first = names.index(options.first) if options.first else 0
    return [
        step
        for number, step in enumerate(steps())
        if number >= first
        and (not options.only or step.name in options.only)
        and (step.quick or not options.quick)
    ]


def _gpus() -> int:
    code = "import torch; print(torch.cuda.device_count())"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return int(ended.stdout) if ended.returncode == 0 else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.first", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of all output")
    parser.add_argument("--list", action="store_true", help="show the steps and run none")
    parser.add_argument(
        "--only", action="append", default=[], metavar="STEP", help="may be repeated"
    )
    parser.add_argument("--from", dest="first", default="", metavar="STEP", help="begin with it")
    parser.add_argument("--quick", action="store_true", help="only what takes seconds")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="of all, in s; 0: no limit")
    parser.add_argument("--nccl", default="", help="the libnccl of ranks that share a GPU")
    parser.add_argument("--pack", action="store_true", help="put the logs of steps into logs.zip")
    options = parser.parse_args(arguments)
    if options.out is None and not options.list:
        parser.error("say where the output is to go: --out FOLDER")
    return options


if __name__ == "__main__":
    sys.exit(main())
