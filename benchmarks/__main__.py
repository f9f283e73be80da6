"""Measure gpudist and its peers; benchmarks/README.md explains the method and the columns."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import SUBJECTS, worlds
from benchmarks.case import Case
from benchmarks.document import RESULTS, show, write_document
from benchmarks.environment import ROOT, environment
from benchmarks.files import write
from benchmarks.measure import ITERATIONS, LEAST_ITERATIONS, measure, rows_of
from benchmarks.peers import mpi
from benchmarks.rows import Row
from benchmarks.worlds import Pages, WorldFailed, started

RANKS = (2, 4)


def main() -> int:
    options = _options()
    errors = Console(stderr=True)
    subjects = SUBJECTS if options.all else (options.subject,)
    rank_counts = options.ranks or (RANKS if options.all else RANKS[:1])
    for name in worlds.MPI_NAMES:
        if name not in worlds.installed(options.peers):
            errors.print(_how_to_get(name, options.peers), soft_wrap=True)
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    measured_in = environment(command, options.iterations)
    try:
        rows, measured_in["versions"] = run(
            subjects, rank_counts, options.cases, options.iterations, options.peers, errors
        )
    except WorldFailed as failure:
        errors.print(f"error: {failure}", style="red", markup=False, soft_wrap=True)
        return 2
    if not rows:
        text = f"error: no case has {options.cases!r} in its name"
        errors.print(text, style="red", markup=False, soft_wrap=True)
        return 2
    show(rows)
    if options.json is not None:
        write(rows, measured_in, options.json)
    if options.all or options.results is not None:
        _write_results(rows, measured_in, options.results or RESULTS)
    wrong = [r for r in rows if not r.correct]
    if wrong:
        errors.print(f"{len(wrong)} of {len(rows)} rows are wrong", style="red")
    return 1 if wrong else 0


def run(
    subjects: Sequence[str],
    rank_counts: Sequence[int],
    name_contains: str,
    iterations: int,
    peers: Path,
    console: Console,
) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the cases, by subject and number of ranks, and the software versions."""
    rows: list[Row] = []
    versions: dict[str, str] = {}
    batches = [
        (ranks, pages, chosen)
        for ranks in rank_counts
        for pages in (worlds.RECYCLED, worlds.NEW)
        if (chosen := _cases(subjects, ranks, name_contains, pages))
    ]
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        total = sum(len(chosen) for _, _, chosen in batches)
        task = progress.add_task("starting", total=total)
        for ranks, pages, chosen in batches:
            progress.update(task, description=f"starting {ranks} ranks{pages.suffix}")
            with started(_launches(chosen, ranks, pages, peers), ranks) as up:
                for world in up:
                    versions |= world.versions
                for case in chosen:
                    words = f"{case.subject}, {ranks} ranks: {case.name}{pages.suffix}"
                    progress.update(task, description=words)
                    rows += rows_of(case, measure(case, up, iterations, pages), pages.suffix)
                    progress.advance(task)
    return sorted(rows, key=lambda r: (SUBJECTS.index(r.subject), r.ranks)), versions


def _cases(subjects: Sequence[str], ranks: int, name_contains: str, pages: Pages) -> list[Case]:
    cases = [
        case
        for subject in subjects
        for case in importlib.import_module(f"benchmarks.{subject}").cases(ranks)
        if name_contains in case.name
    ]
    return [case for case in cases if pages.recycled or case.has_large_output]


def _launches(cases: Sequence[Case], ranks: int, pages: Pages, peers: Path) -> list[worlds.Launch]:
    launches = [worlds.ours(ranks, pages)]
    if any(case.subject in mpi.SUBJECTS for case in cases):
        launches += [worlds.mpi(name, peers, ranks, pages) for name in worlds.installed(peers)]
    return launches


def _how_to_get(name: str, peers: Path) -> str:
    venv = peers / name
    return (
        f"no {name}: its rows are omitted. To install it: make bench, or python3 -m venv {venv} "
        f"&& {venv}/bin/python -m pip install mpi4py numpy {name}"
    )


def _write_results(rows: Sequence[Row], measured_in: dict[str, Any], folder: Path) -> None:
    for subject, ranks in dict.fromkeys((r.subject, r.ranks) for r in rows):
        chosen = [r for r in rows if (r.subject, r.ranks) == (subject, ranks)]
        write(chosen, measured_in, folder / f"{subject}-{ranks}.jsonl")
    write_document(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__,
        epilog=f"Subjects: {', '.join(SUBJECTS)}.",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--subject", choices=SUBJECTS, metavar="SUBJECT", help="one, listed below")
    what.add_argument("--all", action="store_true", help="every subject, on 2 and on 4 ranks")
    parser.add_argument("--ranks", type=int, action="append", help="processes; may be repeated")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only those so named")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="timed, after warm-up")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument(
        "--results", type=Path,
        help="folder for a file of each subject; benchmarks/results with --all",
    )  # fmt: skip
    parser.add_argument("--peers", type=Path, default=ROOT / ".bench", help="folder of MPI venvs")
    options = parser.parse_args()
    if options.iterations < LEAST_ITERATIONS:
        parser.error(f"--iterations must be at least {LEAST_ITERATIONS}")
    if options.cases and (options.all or options.results is not None):
        parser.error("--cases is not for --all or --results, whose files have every case")
    if any(ranks < 2 or ranks % 2 for ranks in options.ranks or ()):
        parser.error("--ranks must be even and at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
