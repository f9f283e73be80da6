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
from textwrap import fill

import gpudist.errors
from gpudist.cli.command import Command, print_json
from gpudist.cli.profile import measure

# Subjects that read result files instead of measuring, with a description of the files.
_READERS = {
    "compare": "the files or folders of two runs, A before and B after",
    "plot": "one or more files or folders",
}
CHECKOUT = Path(gpudist.errors.__file__).resolve().parents[1]


def run(arguments: argparse.Namespace) -> int:
    """Run benchmarks or read their results, and return the exit status."""
    if arguments.subject not in _READERS and arguments.files:
        raise gpudist.errors.ShapeError(
            f"{arguments.subject} takes no files, and got {' '.join(map(str, arguments.files))}; "
            f"{' and '.join(_READERS)} do"
        )
    if arguments.subject == "profile":
        return _profile(arguments)
    if arguments.subject in _READERS:
        return _read_results(arguments)
    require_benchmarks()
    if arguments.subject not in ("all", *subjects()):
        raise gpudist.errors.ShapeError(
            f"no subject {arguments.subject!r}; choose all, {', '.join(_READERS)}, profile, or one "
            f"of {', '.join(subjects())}"
        )
    return _measure(arguments)


def _read_results(arguments: argparse.Namespace) -> int:
    """Compare or plot result files, whose paths are relative to the current folder."""
    checkout = require_benchmarks()
    if arguments.subject == "plot" and find_spec("matplotlib") is None:
        raise gpudist.errors.NotBuiltError(
            "pictures need matplotlib, which is not installed: pip install 'gpudist[bench]'"
        )
    needed = 2 if arguments.subject == "compare" else 1
    if len(arguments.files) < needed or (needed == 2 and len(arguments.files) > 2):
        raise gpudist.errors.ShapeError(
            f"gpudist bench {arguments.subject} takes {_READERS[arguments.subject]}, and got "
            f"{len(arguments.files)} names"
        )
    command = [sys.executable, "-m", f"benchmarks.{arguments.subject}"]
    command += [str(path.absolute()) for path in arguments.files]
    if arguments.subject == "compare" and arguments.fail_above is not None:
        command += ["--fail-above", str(arguments.fail_above)]
    if arguments.subject == "plot":
        command += ["--output", str((arguments.output or Path("plots")).absolute())]
    if arguments.json:
        command.append("--json")
    return subprocess.run(command, cwd=checkout, check=False).returncode


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    if subjects():
        parser.epilog = fill(f"Subjects: {', '.join(subjects())}.", 78)
    add = parser.add_argument
    add("subject", help="such as halo, repartition or conv; all; compare; plot; or profile")
    add(
        "files",
        nargs="*",
        type=Path,
        default=[],
        help="result files or folders, for compare and plot",
    )
    add("--ranks", type=int, action="append", help="number of processes; may be repeated")
    add("--iterations", type=int, help="timed iterations, after warm-up")
    add("--fail-above", type=float, metavar="RATIO",
        help="for compare: exit with 1 if a case is slower by more than this ratio")  # fmt: skip
    add("--output", type=Path,
        help="file for profile (profile.json), or folder for plot (plots)")  # fmt: skip


BENCH = Command(
    "bench",
    "measure operators and layers beside their peers",
    """\
Measure a subject of the benchmarks in a checkout of the repository; its
benchmarks/README.md says what is measured and how. The exit status is 1 if a
result was wrong. compare and plot read earlier results. profile measures the
rates of this machine for gpudist plan, and needs no checkout.

  gpudist bench halo --ranks 2
  gpudist bench compare before/ after/ --fail-above 1.1
  gpudist bench plot benchmarks/results --output plots
  gpudist bench profile --output here.json""",
    add_arguments,
    run,
)
