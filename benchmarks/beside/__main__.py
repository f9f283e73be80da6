"""Measure the same work by gpudist and by libraries for split tensors, in turns.

    python -m benchmarks.correctness --install
    python -m benchmarks.beside --json

A library that ``benchmarks.correctness`` found refusing or wrong in an operator of the work gets
no time, and neither does one whose result differs from the sequential one. ``--json`` writes a file
per number of ranks to benchmarks/results/beside, from which ``python -m benchmarks.beside.page``
writes benchmarks/beside/RESULTS.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.beside.rows import HEADING, BesideRow, cells, summary, timed, untimed
from benchmarks.beside.work import ALL_REDUCE, BLOCK, HALO, OPERATORS, UNET, cases
from benchmarks.case import Case
from benchmarks.correctness.__main__ import FILES as VERDICTS, read as read_verdicts
from benchmarks.correctness.libraries import ABSENT, LIBRARIES
from benchmarks.document import RESULTS
from benchmarks.environment import environment
from benchmarks.files import write
from benchmarks.measure import ITERATIONS, LEAST_ITERATIONS, Series, measure
from benchmarks.worlds import NEW, RECYCLED, Launch, Pages, World, WorldFailed, started
from gpudist.cli.tables import print_columns

FILES = RESULTS / "beside"
RANKS = (2, 4)
ADAPTERS = "benchmarks.beside.adapters"
LAYOUT = "rows"


@dataclass(frozen=True)
class Library:
    """A library that does some of the work.

    Attributes:
        adapter: module in ``ADAPTERS``.
        works: the work that it does.
        python: interpreter with the library.
        is_installed: whether that exists.
    """

    adapter: str
    works: tuple[str, ...]
    python: Path = Path(sys.executable)
    is_installed: bool = True

    def launch(self, ranks: int, pages: Pages) -> Launch:
        module = f"{ADAPTERS}.{self.adapter}"
        command = [str(self.python), "-m", "benchmarks.beside.ranks", module, str(ranks)]
        return Launch(self.adapter, command, {**pages.environment, "GLOO_SOCKET_IFNAME": "lo"})


_PEERS = {peer.name: peer for peer in LIBRARIES}
_SHARD_TENSOR = _PEERS["ShardTensor"]
OURS = Library("ours", (UNET, BLOCK, HALO, ALL_REDUCE))
SHARD_TENSOR = Library(
    "shard_tensor", (UNET, HALO), _SHARD_TENSOR.python, _SHARD_TENSOR.is_installed
)
# Plain torch is in our own environment, whose torch is the one that the libraries pin.
OTHERS = (
    SHARD_TENSOR,
    Library("torch_distributed", (BLOCK, HALO, ALL_REDUCE)),
    Library("alone", (UNET, BLOCK)),
)
# Peers of a work that have no adapter: by the verdicts on its operators, or absent.
BY_VERDICT = {UNET: ("DTensor",)}
ABSENT_FROM = {UNET: ("DistConv (LBANN)",)}


def refusals(work: str, folder: Path = VERDICTS) -> dict[str, str]:
    """Return peers that are not right in an operator of the work, and what they do there."""
    found: dict[str, str] = {name: ABSENT[name] for name in ABSENT_FROM.get(work, ())}
    for name in BY_VERDICT.get(work, ()):
        rows = read_verdicts(folder / f"{_PEERS[name].file}.jsonl")[1]
        kinds: dict[str, list[str]] = {}
        for row in rows:
            if row.layout == LAYOUT and row.case in OPERATORS[work] and row.kind != "right":
                kinds.setdefault(row.kind, []).append(row.case)
        said = [f"{kind}: {', '.join(each)}" for kind, each in kinds.items()]
        found[name] = "; ".join(said) or "right in every operator, and not measured here"
    return found


def run(
    chosen: Sequence[Case], ranks: int, iterations: int, progress: Progress
) -> tuple[list[BesideRow], dict[str, str]]:
    """Return the rows of cases for one number of ranks, and the versions."""
    works = {case.parameters["work"] for case in chosen}
    present = [each for each in (OURS, *OTHERS) if each.is_installed and works & set(each.works)]
    does = {each.adapter: each.works for each in present}
    task = progress.add_task(f"{ranks} ranks: starting", total=None)
    found: list[tuple[Case, list[Series], dict[str, str]]] = []
    versions: dict[str, str] = {}
    with started([each.launch(ranks, RECYCLED) for each in present], ranks) as up:
        alive = list(up)
        for world in up:
            versions |= world.versions
        for case in chosen:
            progress.update(task, description=f"{ranks} ranks: {case.name}")
            able = [each for each in alive if case.parameters["work"] in does[each.name]]
            right, verdicts = examine(case, able)
            dead = {name for name, verdict in verdicts.items() if verdict.startswith("raised")}
            alive = [each for each in alive if each.name not in dead]
            found.append((case, measure(case, right, iterations, RECYCLED), verdicts))
    rows: list[BesideRow] = []
    for case, (mine, *peers), verdicts in found:
        progress.update(task, description=f"{ranks} ranks, memory: {case.name}")
        peaks = memory(case, ranks, present) if case.parameters["memory"] else {}
        verdicts = {**verdicts, **refusals(case.parameters["work"])}
        for each in (OURS, *OTHERS):
            if not each.is_installed and case.parameters["work"] in each.works:
                verdicts[each.adapter] = "not installed: python -m benchmarks.correctness --install"
        rows += [timed(case, mine, peer, peaks) for peer in peers]
        rows += [untimed(case, mine, *verdict, peaks) for verdict in verdicts.items()]
    progress.remove_task(task)
    return rows, versions


def examine(case: Case, worlds: Sequence[World]) -> tuple[list[World], dict[str, str]]:
    """Return the worlds whose sides are all right, ours first, and verdicts on the others.

    Raises:
        WorldFailed: ours failed.
    """
    right: list[World] = []
    verdicts: dict[str, str] = {}
    for number, world in enumerate(worlds):
        try:
            is_right = all([world.check(name) for name in world.prepare(case)])
        except WorldFailed as failure:
            if number == 0:
                raise
            verdicts[world.name] = f"raised: {str(failure).splitlines()[-1]}"
            continue
        if is_right or number == 0:
            right.append(world)
        else:
            verdicts[world.name] = "silently wrong"
    return right, verdicts


def memory(case: Case, ranks: int, libraries: Sequence[Library]) -> dict[str, float]:
    """Return the peak memory by side, of new processes that return freed memory to the system."""
    chosen = [each for each in libraries if case.parameters["work"] in each.works]
    peaks: dict[str, float] = {}
    with started([each.launch(ranks, NEW) for each in chosen], ranks) as up:
        for world in up:
            for name in world.prepare(case):
                peaks[name] = round(world.peak_mib(name), 1)
    return peaks


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    errors = Console(stderr=True)
    wrong = False
    rows: list[BesideRow] = []
    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    for ranks in options.ranks or RANKS:
        chosen = [case for case in cases(ranks) if options.cases in case.name]
        if not chosen:
            errors.print(f"error: no case has {options.cases!r} in its name", markup=False)
            return 2
        command = " ".join(["python -m benchmarks.beside", *(arguments or sys.argv[1:])])
        measured_in = environment(command, options.iterations)
        try:
            with Progress(*columns, console=errors, transient=True) as progress:
                found, measured_in["versions"] = run(chosen, ranks, options.iterations, progress)
        except WorldFailed as failure:
            errors.print(f"error: {failure}", style="red", markup=False, soft_wrap=True)
            return 2
        rows += found
        wrong |= not all(row.correct for row in found)
        if options.json is not None:
            write(found, measured_in, options.json / f"beside-{ranks}.jsonl")
    print_columns(HEADING, [cells(row) for row in rows])
    print(f"\n{summary(rows)}")
    if wrong:
        errors.print("gpudist is wrong in some rows", style="red")
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    parser.add_argument(
        "--ranks", type=int, action="append", choices=RANKS,
        help="processes; may be repeated; default: 2 and 4",
    )  # fmt: skip
    parser.add_argument("--cases", default="", metavar="TEXT", help="only those so named")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="timed, after warm-up")
    parser.add_argument(
        "--json", type=Path, nargs="?", const=FILES, metavar="FOLDER",
        help="folder for a file per number of ranks; default: benchmarks/results/beside",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.iterations < LEAST_ITERATIONS:
        parser.error(f"--iterations must be at least {LEAST_ITERATIONS}")
    if options.cases and options.json == FILES:
        parser.error("--cases is not for the committed results, whose files have every case")
    return options


if __name__ == "__main__":
    sys.exit(main())
