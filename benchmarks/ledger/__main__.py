"""Count what a training step costs on a GPU, beside the sequential network's on the same block.

Runs on CPUs, over test doubles of CUDA and NCCL; benchmarks/ledger/RESULTS.md explains the columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

import gpudist
from benchmarks.environment import ROOT, environment
from benchmarks.ledger.networks import SUBJECTS
from benchmarks.ledger.step import DTYPES, Row, count_step
from gpudist.testing.rank_pool import RankPool
from tests.doubles import use_doubles

RANKS = (1, 2, 4)
ROWS = ROOT / "benchmarks" / "results" / "ledger" / "rows.jsonl"
_LIMIT_S = 600.0
# Pairs of timed steps.
_TIMED = 20


def main() -> int:
    options = _options()
    errors = Console(stderr=True)
    command = " ".join(["python -m benchmarks.ledger", *sys.argv[1:]])
    about = environment(command, options.timed)
    about["versions"] = {"gpudist": gpudist.__version__, "torch": torch.__version__}
    names = [name for name in SUBJECTS if options.network in name]
    if not names:
        errors.print(f"error: no network has {options.network!r} in its name", style="red")
        return 2
    cases = list(_cases(names, options.ranks or RANKS))
    use_doubles()
    rows: list[Row] = []
    with RankPool(max(options.ranks or RANKS), _LIMIT_S) as pool:
        for ranks, *case in track(cases, console=errors, transient=True):
            rows += _row(pool, ranks, (*case, options.timed))
    lines = [{"environment": about}, *map(asdict, rows)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    if options.json is None:
        _show(rows)
    elif str(options.json) == "-":
        sys.stdout.write(text)
    else:
        options.json.write_text(text, encoding="utf-8")
    return 0


def read_rows(path: Path = ROWS) -> list[Row]:
    """Return the rows of a file that this program has written."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Row(**line) for line in lines if "environment" not in line]


def _row(pool: RankPool, ranks: int, case: Sequence[object]) -> list[Row]:
    return pool.run(ranks, count_step, case, {}, _LIMIT_S, "nccl")[:1]


def _cases(names: Sequence[str], rank_counts: Sequence[int]) -> Iterator[tuple[int, str, str, str]]:
    for name in names:
        for ranks in (n for n in SUBJECTS[name].ranks if n in rank_counts):
            for dtype in DTYPES:
                for layout in SUBJECTS[name].layouts:
                    yield ranks, name, dtype, layout


def _show(rows: Sequence[Row]) -> None:
    heading = f"{'network':26}{'ranks':>6} {'dtype':9}{'layout':14}"
    print(f"{heading}{'launches':>14}{'MB':>16}{'kept MB':>14}{'host ms':>14}")
    for row in rows:
        pairs = [f"{row.launches} / {row.launches_sequential}"]
        pairs += [
            f"{ours / 1e6:.1f} / {alone / 1e6:.1f}"
            for ours, alone in (
                (row.device_bytes, row.device_bytes_sequential),
                (row.kept_bytes, row.kept_bytes_sequential),
            )
        ]
        timed = row.host_us is not None and row.host_us_sequential is not None
        pairs += [f"{row.host_us / 1e3:.1f} / {row.host_us_sequential / 1e3:.1f}" if timed else "-"]  # pyright: ignore
        columns = "".join(f"{pair:>{w}}" for pair, w in zip(pairs, (14, 16, 14, 14), strict=True))
        print(f"{row.network:26}{row.ranks:6} {row.dtype:9}{row.layout:14}{columns}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger", description=__doc__)
    parser.add_argument(
        "--json", type=Path, nargs="?", const=Path("-"), metavar="FILE",
        help="write rows as JSON lines, to the standard output if no file is given",
    )  # fmt: skip
    parser.add_argument("--network", default="", metavar="TEXT", help="only those so named")
    parser.add_argument("--ranks", type=int, action="append", choices=RANKS, help="repeatable")
    parser.add_argument("--timed", type=int, default=_TIMED, help="pairs of timed steps; 0: none")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
