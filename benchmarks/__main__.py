"""``python -m benchmarks --subject messages --ranks 2 --json FILE``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.harness import ITERATIONS, show, write
from gpudist.testing import run_distributed

SUBJECTS = ("messages",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--subject", choices=SUBJECTS, required=True)
    parser.add_argument("--ranks", type=int, default=2, help="processes on this node")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="timed, after warm-up")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    subject = importlib.import_module(f"benchmarks.{options.subject}")
    rows = run_distributed(
        subject.measure, options.ranks, options.iterations, transport="host", timeout=600.0
    )[0]
    show(rows)
    if options.json is not None:
        write(rows, options.json)
    return 0 if all(row.correct for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
