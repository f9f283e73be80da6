"""Run the same cases through gpudist and its peers, and say what became of each.

    python -m benchmarks.correctness --install
    python -m benchmarks.correctness --json

``--install`` makes the peers' virtual environments in build/correctness; a library without one is
named and left out. ``--json`` writes a file per library to benchmarks/results/correctness, from
which ``python -m benchmarks.correctness.page`` writes benchmarks/correctness/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.correctness.case import LAYOUTS, Case, Layout
from benchmarks.correctness.cases import CASES
from benchmarks.correctness.judge import KINDS
from benchmarks.correctness.libraries import ABSENT, FOLDER, LIBRARIES, Peer
from benchmarks.correctness.world import CannotStart, Library
from benchmarks.document import RESULTS
from benchmarks.environment import environment
from gpudist.cli.tables import print_columns

FILES = RESULTS / "correctness"
LIMIT_S = 60.0
HEADING = ("", "version", "runs", *KINDS)


@dataclass(frozen=True)
class Row:
    """Verdict on one case in one layout, with what it is about.

    Attributes:
        library: name of the library.
        version: its version, with that of its torch.
        commit: commit that it was built from; ``None`` if the package does not say.
        case, layout: names of both.
        kind, detail, error: see :class:`~benchmarks.correctness.judge.Verdict`.
    """

    library: str
    version: str
    commit: str | None
    case: str
    layout: str
    kind: str
    detail: str
    error: float | None


def runs(name_contains: str = "") -> list[tuple[Case, Layout]]:
    """Return the cases in their layouts, worlds of one size together."""
    cases = [case for case in CASES if name_contains in case.name]
    layouts = sorted(LAYOUTS, key=lambda layout: layout.ranks)
    return [(case, each) for each in layouts for case in cases if each in case.layouts()]


def rows_of(peer: Peer, chosen: Sequence[tuple[Case, Layout]], limit_s: float) -> Iterator[Row]:
    """Run cases by a library; yield the row of each."""
    with Library(peer.adapter, peer.python, FOLDER / f"{peer.file}.log", limit_s) as library:
        for case, layout in chosen:
            found = library.verdict(case, layout)
            where = (case.name, layout.name)
            yield Row(peer.name, library.version, library.commit, *where, **asdict(found))


def counts(rows: Sequence[Row]) -> list[int]:
    """Return the number of rows of every kind."""
    return [sum(row.kind == kind for row in rows) for kind in KINDS]


def table(of: dict[str, Sequence[Row]]) -> list[tuple[str, ...]]:
    """Return a line per library, under ``HEADING``."""
    return [
        (name, rows[0].version, str(len(rows)), *(str(count) for count in counts(rows)))
        for name, rows in of.items()
        if rows
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    errors = Console(stderr=True)
    chosen = runs(options.cases)
    peers = [peer for peer in LIBRARIES if not options.library or peer.name in options.library]
    if options.install:
        for peer in peers:
            errors.print(f"installing {peer.name}")
            peer.install()
    found: dict[str, Sequence[Row]] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    present = [peer for peer in peers if peer.is_installed]
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("starting", total=len(present) * len(chosen))
        for peer in present:
            before = environment(" ".join(["python -m benchmarks.correctness", *sys.argv[1:]]), 1)
            path = None if options.json is None else options.json / f"{peer.file}.jsonl"
            rows = read(path)[1] if options.resume and path is not None and path.exists() else []
            known = {(row.case, row.layout) for row in rows}
            missing = [each for each in chosen if (each[0].name, each[1].name) not in known]
            progress.update(task, description=peer.name, advance=len(rows))
            if path is not None and not rows:
                _start(path, before)
            try:
                for row in rows_of(peer, missing, options.limit) if missing else ():
                    rows.append(row)
                    progress.update(
                        task, description=f"{peer.name}: {row.case}, {row.layout}", advance=1
                    )
                    if path is not None:
                        _add(path, asdict(row))
            except CannotStart as failure:
                errors.print(f"error: {peer.name}: {failure}", style="red", markup=False)
                return 2
            found[peer.name] = rows
    print_columns(HEADING, table(found))
    for peer in peers:
        if not peer.is_installed:
            print(f"not installed here: {peer.name}; --install makes {peer.python.parents[1]}")
    for name, reason in ABSENT.items():
        print(f"not installed here: {name}: {reason}")
    ours = [row for name, rows in found.items() if name.startswith("gpudist") for row in rows]
    wrong = [row for row in ours if row.kind not in ("right", "not offered")]
    for row in wrong:
        print(f"{row.library}: {row.case}, {row.layout}: {row.kind}: {row.detail}")
    return 1 if wrong else 0


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return the environment and the rows of a file."""
    first, *rest = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return first["environment"], [Row(**fields) for fields in rest]


def _start(path: Path, before: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("", encoding="utf-8")
    _add(path, {"environment": before})


def _add(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.correctness", description=__doc__)
    parser.add_argument(
        "--library", action="append", choices=[peer.name for peer in LIBRARIES],
        help="only this one; may be repeated",
    )  # fmt: skip
    parser.add_argument("--cases", default="", metavar="TEXT", help="only those so named")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="seconds a case; default: 60"
    )
    parser.add_argument(
        "--install", action="store_true", help="make the virtual environments that are missing"
    )
    parser.add_argument(
        "--json", type=Path, nargs="?", const=FILES, metavar="FOLDER",
        help="folder for a file per library; default: benchmarks/results/correctness",
    )  # fmt: skip
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows that the files have, and add the others",
    )
    options = parser.parse_args(arguments)
    if options.cases and options.json == FILES:
        parser.error("--cases is not for the committed results, whose files have every case")
    return options


if __name__ == "__main__":
    sys.exit(main())
