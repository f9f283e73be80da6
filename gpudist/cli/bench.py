"""``gpudist bench``: run the benchmarks of a checkout, which are not installed."""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import gpudist.errors
from gpudist.cli.command import print_json

CHECKOUT = Path(gpudist.errors.__file__).resolve().parents[1]


def run(arguments: argparse.Namespace) -> int:
    """Run benchmarks, and return the exit status."""
    if arguments.subject == "profile":
        return _profile(arguments)
    require_benchmarks()
    if arguments.subject not in ("all", *subjects()):
        raise gpudist.errors.ShapeError(
            f"no subject {arguments.subject!r}; choose all, profile, or one of "
            f"{', '.join(subjects())}"
        )
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
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
        rows = Path(folder) / "rows.jsonl"
        ended = subprocess.run(
            [*command, "--json", str(rows)], cwd=checkout, check=False, stdout=subprocess.DEVNULL
        )
        if rows.exists():
            print_json([json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()])
        return ended.returncode


def _profile(arguments: argparse.Namespace) -> int:
    # Other subjects, and the command line's help, need no torch.
    from gpudist.cli.profile import measure

    output = arguments.output or Path("profile.json")
    profile = measure((arguments.ranks or [2])[-1], output)
    if arguments.json:
        print_json(asdict(profile))
    else:
        print(f"{output}: {profile.source}")
    return 0


def require_benchmarks() -> Path:
    """Return the folder in which to run ``python -m benchmarks``.

    Raises:
        NotBuiltError: there is no such folder, or rich is not installed.
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


def subjects() -> tuple[str, ...]:
    """Return the subjects of the checkout's benchmarks; none where there is no checkout."""
    file = CHECKOUT / "benchmarks" / "__init__.py"
    return runpy.run_path(str(file))["SUBJECTS"] if file.exists() else ()
