"""Measure gpudist on GPUs; benchmarks/README.md explains the method and the columns.

On one GPU, every subject runs in its own process, so that a broken GPU context affects only one
subject. Subjects that are named run in this process. If torchrun started several ranks, they
measure the traffic between GPUs in one run. Over the test doubles, this is a rehearsal: small
cases, and no times.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import gpudist
from benchmarks.files import write
from benchmarks.gpu import SEVERAL_RANKS, SUBJECTS, itself, several, torch_messages
from benchmarks.gpu.files import RESULTS, ROOT, line_of, machine, path_of, read
from benchmarks.gpu.machine import CudaMachine, HostMachine
from benchmarks.gpu.measure import ITERATIONS, GpuRow, measure
from gpudist.world.environment import describe
from gpudist.world.partition import Partition
from gpudist.world.runtime import build_info, settings

LEAST_ITERATIONS = 20
# Of a rehearsal, whose times are not results; quantiles take two.
REHEARSED = 2
WAIT_S = 60.0
# The first rank computes the expected step of the volume alone.
SEVERAL_WAIT_S = 300.0
# Limits for all subjects together, and for one.
ALL_S, SUBJECT_S = 480.0, 90.0
# Long enough for all ranks to enqueue every side's calls of an iteration.
SEVERAL_HOLD_US = 3000.0
WRONG, FAILED, NO_GPU = 1, 2, 3


def main() -> int:
    options = _options()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for subject in options.subject or (None,):
        missing = what_is_missing(ranks, subject)
        if missing:
            print(f"error: nothing is measured: {missing}", file=sys.stderr)
            return NO_GPU
    if not options.subject and ranks == 1:
        return _run_all(options)
    if is_rehearsal():
        os.environ.setdefault("GPUDIST_TRANSPORT", "nccl")
    P_world = gpudist.init(timeout=WAIT_S if ranks == 1 else SEVERAL_WAIT_S)
    rows: list[GpuRow] = []
    failures: list[str] = []
    try:
        for subject in options.subject or several.SUBJECTS:
            found = run(subject, P_world, options.iterations, failures, options.smallest)
            rows += found
            if P_world.rank == 0:
                _write(subject, found, rows, P_world.size, options)
    finally:
        itself.end()
        torch_messages.end()
    if failures:
        print(f"error: {len(failures)} cases failed, the first: {failures[0]}", file=sys.stderr)
        return FAILED
    wrong = [f"{row.subject} {row.case}" for row in rows if not row.correct]
    if wrong:
        print(f"error: {len(wrong)} rows are wrong, the first: {wrong[0]}", file=sys.stderr)
        return WRONG
    if P_world.rank == 0:
        print(f"{len(rows)} rows are right")
    return 0


def _write(
    subject: str, found: list[GpuRow], rows: list[GpuRow], ranks: int, options: argparse.Namespace
) -> None:
    measured_with = machine(options.commit, ranks)
    if options.json is not None:
        write(rows, measured_with, options.json)
    if options.results is not None:
        write(found, measured_with, path_of(subject, ranks, options.results))


def is_rehearsal() -> bool:
    """Return whether this runs over the test doubles, whose times are not results."""
    return settings().device_library != ""


def what_is_missing(ranks: int, subject: str | None) -> str:
    """Return why nothing can be measured here; empty if measuring is possible."""
    if is_rehearsal():
        return ""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} does not see a GPU"
    if build_info().nccl_missing:
        return build_info().nccl_missing
    if ranks == 1:
        return f"{subject} takes several ranks" if subject in several.SUBJECTS else ""
    if subject in SUBJECTS and subject not in SEVERAL_RANKS:
        known = (*several.SUBJECTS, *SEVERAL_RANKS)
        return f"{subject} is one rank's work; on {ranks} ranks there are {', '.join(known)}"
    if ranks % 2 and subject in SEVERAL_RANKS:
        return f"the number of ranks must be even, but is {ranks}"
    return _why_not_shared(ranks)


def _why_not_shared(ranks: int) -> str:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = torch.cuda.device_count()
    if here <= gpus:
        return ""
    nccl = describe().nccl
    reason = f"{here} ranks share {gpus} GPUs, which needs NCCL 2.30"
    if nccl is None or tuple(map(int, nccl.version.split(".")[:2])) < (2, 30):
        return f"{reason}; NCCL is {nccl.version if nccl is not None else 'not there'}"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return f"{reason} and NCCL_MULTI_RANK_GPU_ENABLE=1"
    return ""


@torch.no_grad()
def run(
    subject: str, P_world: Partition, iterations: int, failures: list[str] | None = None,
    smallest: bool = False,
) -> list[GpuRow]:  # fmt: skip
    """Return the rows of all cases of a subject; rank 0 prints them as they arrive.

    Args:
        subject: name of the module.
        P_world: all ranks.
        iterations: number of times, after warm-up; none in a rehearsal.
        failures: receives the errors of cases; an error is raised if it is ``None``, or there are
            several ranks.
        smallest: one case for each clock.
    """
    room = "benchmarks.gpu.several" if subject in several.SUBJECTS else "benchmarks.gpu"
    module = importlib.import_module(f"{room}.{subject}")
    rehearsal = is_rehearsal()
    hold_us = SEVERAL_HOLD_US if P_world.size > 1 else None
    gpu = HostMachine() if rehearsal else CudaMachine(hold_us=hold_us)
    cases = module.cases(P_world.size, tiny=True) if rehearsal else module.cases(P_world.size)
    if smallest:
        cases = {case.clock: case for case in cases}.values()
    rows: list[GpuRow] = []
    for case in cases:
        try:
            sides = module.sides(case, P_world, gpu)
            found = measure(case, sides, gpu, P_world, REHEARSED if rehearsal else iterations)
            del sides
        except Exception as error:
            if failures is None or P_world.size > 1:
                raise
            failures.append(f"{case.subject}, {case.name}: {type(error).__name__}: {error}")
            print(f"error: {failures[-1]}", flush=True)
            continue
        if P_world.rank == 0:
            for row in found:
                print(line_of(row), flush=True)
        rows += found
        gc.collect()
        if not rehearsal:
            torch.cuda.empty_cache()
    return rows


def _run_all(options: argparse.Namespace) -> int:
    """Run every subject in its own process; return the worst exit status."""
    deadline_s = time.monotonic() + ALL_S
    worst, rows, measured_with = 0, [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for subject in SUBJECTS:
            left_s = min(SUBJECT_S, deadline_s - time.monotonic())
            if left_s <= 0:
                print(
                    f"error: {subject}: the limit of {ALL_S:g} s for all subjects has passed",
                    file=sys.stderr,
                )
                worst = max(worst, FAILED)
                continue
            path = Path(scratch) / "rows.jsonl"
            status = _run_apart(subject, options, path, left_s)
            worst = max(worst, status)
            if path.exists():
                measured_with, found = read(path)
                rows += [GpuRow(**row) for row in found]
                path.unlink()
    if options.json is not None and rows:
        write(rows, measured_with, options.json)
    return worst


def _run_apart(subject: str, options: argparse.Namespace, path: Path, limit_s: float) -> int:
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--subject", subject, "--json", str(path)),
        *("--iterations", str(options.iterations), "--commit", options.commit),
        *(("--results", str(options.results)) if options.results is not None else ()),
    ]
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"error: {subject} was not done after {limit_s:.0f} s", file=sys.stderr)
        return FAILED
    if status not in (0, WRONG):
        print(f"error: {subject} ended with status {status}", file=sys.stderr)
        return FAILED
    return status


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--subject", choices=(*SUBJECTS, *several.SUBJECTS), action="append", default=[],
        help="may be repeated",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="timed, after warm-up")
    parser.add_argument("--smallest", action="store_true", help="one case for each clock")
    parser.add_argument("--json", type=Path, help="file for all rows")
    parser.add_argument(
        "--results", type=Path, nargs="?", const=RESULTS,
        help="folder for a file of each subject; benchmarks/results if none is named",
    )  # fmt: skip
    parser.add_argument("--commit", default="", help="for the files, where git cannot tell")
    options = parser.parse_args()
    if options.iterations < LEAST_ITERATIONS:
        parser.error(f"--iterations must be at least {LEAST_ITERATIONS}")
    if options.json is None and options.results is None:
        parser.error("say where to write the rows: --json FILE or --results [FOLDER]")
    return options


if __name__ == "__main__":
    sys.exit(main())
