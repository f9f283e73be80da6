"""``gpudist bench``: the benchmarks, which are in the repository and are not installed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import gpudist.errors
from gpudist.cli.command import Command, print_json
from gpudist.cli.profile import measure

CHECKOUT = Path(gpudist.errors.__file__).resolve().parents[1]


def run(arguments: argparse.Namespace) -> int:
    """Run them, and return their exit status."""
    if arguments.subject == "profile":
        return _profile(arguments)
    checkout = require_benchmarks()
    command = [sys.executable, "-m", "benchmarks"]
    command += ["--all"] if arguments.subject == "all" else ["--subject", arguments.subject]
    for ranks in arguments.ranks or ():
        command += ["--ranks", str(ranks)]
    if arguments.iterations is not None:
        command += ["--iterations", str(arguments.iterations)]
    if not arguments.json:
        return subprocess.run(command, cwd=checkout, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        ended = subprocess.run(
            [*command, "--json", str(rows)], cwd=checkout, check=False, stdout=subprocess.DEVNULL
        )
        if rows.exists():
            print(rows.read_text(encoding="utf-8"), end="")
        return ended.returncode


def _profile(arguments: argparse.Namespace) -> int:
    profile = measure((arguments.ranks or [2])[-1], arguments.output)
    if arguments.json:
        print_json(asdict(profile))
    else:
        print(f"{arguments.output}: {profile.source}")
    return 0


def require_benchmarks() -> Path:
    """The folder that ``python -m benchmarks`` can be run in.

    Raises:
        NotBuiltError: there is none, or rich is not installed.
    """
    if not (CHECKOUT / "benchmarks" / "__main__.py").exists():
        raise gpudist.errors.NotBuiltError(
            "the benchmarks are in gpudist's repository and not in the installed package: clone "
            "it, run pip install -e '.[bench]' there, then gpudist bench again"
        )
    if find_spec("rich") is None:
        raise gpudist.errors.NotBuiltError(
            "the benchmarks need rich, which is not installed: pip install 'gpudist[bench]'"
        )
    return CHECKOUT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", help="such as halo, repartition or conv; all; or profile")
    parser.add_argument("--ranks", type=int, action="append", help="processes; may be repeated")
    parser.add_argument(
        "--output", type=Path, default=Path("profile.json"), help="of profile: the file it writes"
    )
    parser.add_argument("--iterations", type=int, help="timed, after warm-up")


BENCH = Command(
    "bench",
    "measure operators and layers beside their peers",
    "Measure a subject of the benchmarks in a checkout of the repository; docs/benchmarks.md there "
    "says what is measured and how. Exit status 1 if a result was wrong. The subject profile "
    "measures the rates of this machine for gpudist plan, and needs no checkout.\n\n"
    "  gpudist bench halo --ranks 2\n"
    "  gpudist bench profile --output here.json",
    add_arguments,
    run,
)
