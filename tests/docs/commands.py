"""Commands on the pages, checked by the argument parsers of the programs they start."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

from torch.distributed.run import get_args_parser as torchrun_parser

from gpudist.cli.main import parser as gpudist_parser
from tests.docs.pages import ROOT

Arguments = Sequence[str]


class Parsed(BaseException):
    """A program has understood its arguments."""


def understand(command: str, files: Collection[str]) -> None:
    """Parse ``command``; ``files`` are those of its page.

    Raises:
        AssertionError: no program here takes it.
    """
    for part in command.split("&&"):
        words = shlex.split(part)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        name = words[0].rpartition("/")[2]
        assert name in PROGRAMS, f"{part}: {name} is not one of {sorted(PROGRAMS)}"
        try:
            PROGRAMS[name](words[1:], files)
        except SystemExit as refusal:
            raise AssertionError(f"{part}: refused") from refusal


def _gpudist(arguments: Arguments, files: Collection[str]) -> None:
    gpudist_parser().parse_args(list(arguments))


def _torchrun(arguments: Arguments, files: Collection[str]) -> None:
    parsed = torchrun_parser().parse_args(list(arguments))
    program, rest = parsed.training_script, parsed.training_script_args
    _python(["-m", program, *rest] if parsed.module else [program, *rest], files)


def _python(arguments: Arguments, files: Collection[str]) -> None:
    if arguments[0] != "-m":
        if arguments[0] not in files:
            _start(str(ROOT / arguments[0]), runpy.run_path, arguments[1:])
    elif arguments[1] == "gpudist":
        _gpudist(arguments[2:], files)
    elif arguments[1] == "pip":
        _pip(arguments[2:], files)
    elif arguments[1] != "venv":
        _start(arguments[1], partial(runpy.run_module, alter_sys=True), arguments[2:])


def _start(program: str, run: Callable[..., object], arguments: Arguments) -> None:
    """Start the program until it has parsed its arguments; one without a parser takes none."""
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self: argparse.ArgumentParser, args: Arguments | None = None) -> None:
        parse(self, args)
        raise Parsed

    with (
        warnings.catch_warnings(),
        patch.object(argparse.ArgumentParser, "parse_args", parse_alone),
        patch.object(sys, "argv", [program, *arguments]),
        patch.object(sys, "path", [str(Path(program).parent), str(ROOT), *sys.path]),
        suppress(Parsed),
    ):
        # A module that a test has imported already is started all the same.
        warnings.simplefilter("ignore", RuntimeWarning)
        run(program, run_name="__main__" if _reads_arguments(program) else "__docs__")
        assert not arguments, f"{program} takes no arguments"


def _reads_arguments(program: str) -> bool:
    path = Path(program) if program.endswith(".py") else ROOT / program.replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return "ArgumentParser" in path.read_text(encoding="utf-8")


def _make(arguments: Arguments, files: Collection[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in arguments:
        variable, is_set, _ = word.partition("=")
        known = rf"^{variable} \?=" if is_set else rf"^{re.escape(word)}:"
        assert re.search(known, text, re.MULTILINE), f"make {word}: not in the Makefile"


def _pip(arguments: Arguments, files: Collection[str]) -> None:
    """Extras are those of pyproject.toml, files are there, pins those of constraints.txt."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert arguments[0] in ("install", "uninstall"), arguments
    for word in arguments[1:]:
        if extras := re.fullmatch(r"(?:\.|gpudist)\[([\w,-]+)\]", word):
            for extra in extras[1].split(","):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), f"no extra {extra}"
        elif word.endswith(".txt"):
            assert (ROOT / word).is_file(), f"{word} is not there"
        elif word.startswith("torch=="):
            assert f"\n{word}\n" in pins, f"constraints.txt has another {word}"


def _shell(arguments: Arguments, files: Collection[str]) -> None:
    pass


def _launcher(arguments: Arguments, files: Collection[str]) -> None:
    starts = [at for at, word in enumerate(arguments) if Path(word).name in PROGRAMS]
    assert starts, f"{arguments}: no program in them is known"
    PROGRAMS[Path(arguments[starts[0]]).name](arguments[starts[0] + 1 :], files)


def _sbatch(arguments: Arguments, files: Collection[str]) -> None:
    assert arguments[-1] in files, f"sbatch {arguments[-1]}: the page has no such file"


PROGRAMS: dict[str, Callable[[Arguments, Collection[str]], None]] = {
    "gpudist": _gpudist,
    "torchrun": _torchrun,
    "python": _python,
    "python3": _python,
    "make": _make,
    "pip": _pip,
    **dict.fromkeys(("srun", "mpirun", "mpiexec", "timeout", "env"), _launcher),
    "sbatch": _sbatch,
    **dict.fromkeys(("cd", "export", "mkdir", "ls", "cat", "."), _shell),
    **dict.fromkeys(("git", "kill", "pkill", "ssh"), _shell),
}


def is_script(text: str) -> bool:
    """Return whether bash can read ``text``."""
    ended = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    return ended.returncode == 0
