"""Find out in five minutes what works on a GPU, and how fast: ``python -m tests.gpu.first``.

Every step runs separately, within its own time limit, even if others failed. The folder receives
three files, each whole after every step: ``table.txt``, ``summary.json`` and, with all logs and
rows of results, ``logs.zip``. ``--second --done SUMMARY`` runs what the first minutes had no time
for. If GPUDIST_DEVICE_LIBRARY names the doubles, the run is a rehearsal of both.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

from tests.gpu.first.runner import ROOT, Outcome, Place, line_of, run_all, table
from tests.gpu.first.steps import Step, first_steps, second_steps

BUDGET_S = 290.0
NCCL_VARIABLE = "GPU_FIRST_NCCL"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a step failed or was not done in time."""
    options = _options(arguments)
    start_s = time.monotonic()
    rehearsal = os.environ.get("GPUDIST_DEVICE_LIBRARY", "") != ""
    if options.list:
        for step in _chosen(options, rehearsal):
            print(f"{step.name:<24}{step.limit_s:>5.0f} s  {step.shows}")
        return 0
    if rehearsal:
        print("a rehearsal over the doubles: nothing here is a result of a GPU", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-first-") as scratch:
        logs = Path(scratch, "logs")
        place = Place(
            options.out.resolve(), logs, rehearsal,
            options.budget or float("inf"), _nccl(options.nccl, Path(scratch)),
            options.wheel is not None, options.commit, options.beside,
        )  # fmt: skip
        if options.wheel is not None:
            print(f"{_unpack(options.wheel)} is from {options.wheel}", flush=True)
        outcomes = run_all(_chosen(options, rehearsal), place, _say)
    print(f"\n{table(outcomes)}\n")
    count = {status: 0 for status in ("ok", "failed", "timeout", "skipped")}
    for outcome in outcomes:
        count[outcome.status] += 1
    text = ", ".join(f"{number} {status}" for status, number in count.items())
    print(f"{text}; {time.monotonic() - start_s:.0f} s; {place.out}")
    return 1 if count["failed"] or count["timeout"] else 0


def _say(outcome: Outcome) -> None:
    print(line_of(outcome), flush=True)


def _chosen(options: argparse.Namespace, rehearsal: bool) -> list[Step]:
    first, second = first_steps(), second_steps()
    steps = (*first, *second) if options.second or rehearsal else first
    if options.done is not None and options.done.exists():
        done = {outcome["step"] for outcome in json.loads(options.done.read_text())
                if outcome["status"] != "skipped"}  # fmt: skip
        steps = tuple(step for step in steps if step.name not in done)
    names = [step.name for step in steps]
    unknown = {*options.only, *filter(None, [options.first])} - {*names}
    if unknown:
        sys.exit(f"error: no step is called {', '.join(sorted(unknown))}; there are {names}")
    begin = names.index(options.first) if options.first else 0
    return [step for step in steps[begin:] if not options.only or step.name in options.only]


def _nccl(path: str, scratch: Path) -> str:
    """Return the path of the libnccl, unpacked if it is an xz file."""
    if not path:
        return ""
    found = Path(path).resolve()
    if found.suffix == ".xz":
        with lzma.open(found) as packed, open(scratch / found.stem, "wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 24)
        found = scratch / found.stem
    return str(found)


def _unpack(wheel: Path) -> str:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        archive.extract(name, ROOT)
    return name


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.first", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of all output")
    parser.add_argument("--second", action="store_true", help="these steps and those after them")
    parser.add_argument(
        "--done", type=Path, metavar="FILE",
        help="summary.json of an earlier run, whose steps are left out except those it skipped",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="show the steps and run none")
    parser.add_argument(
        "--only", action="append", default=[], metavar="STEP", help="may be repeated"
    )
    parser.add_argument("--from", dest="first", default="", metavar="STEP", help="begin with it")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="of all, in s; 0: no limit")
    parser.add_argument("--beside", type=int, default=6, help="steps that run at once")
    parser.add_argument(
        "--nccl", default=os.environ.get(NCCL_VARIABLE, ""),
        help="libnccl.so.2, or an xz file of it, for ranks that share a GPU",
    )  # fmt: skip
    parser.add_argument("--wheel", type=Path, help="with the native core, which else is built")
    parser.add_argument("--commit", default="", help="of the code, where git cannot tell")
    options = parser.parse_args(arguments)
    if options.out is None and not options.list:
        parser.error("say where the output is to go: --out FOLDER")
    return options


if __name__ == "__main__":
    sys.exit(main())
