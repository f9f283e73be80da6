"""Run tests against a mutant, in a fork of a process that has loaded torch and pytest."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

_OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--tb=line"]
# Pytest's plugins, which have already been imported.
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]

KILLED, SURVIVED, TIMED_OUT = "killed", "survived", "timed out"


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another source."""

    def __init__(self, module: str, path: str, source: str) -> None:
        self._module, self._path, self._source = module, path, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=self._path)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._path
        exec(compile(self._source, self._path, "exec"), vars(module))


def outcome(
    module: str, path: str, source: str, arguments: Sequence[str], limit_s: float, examples: int
) -> str:
    """Return whether pytest fails if ``module`` has this source.

    Nothing of gpudist may have been imported here.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(reader)
        _test(module, path, source, arguments, examples, writer)
    os.close(writer)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(child, child)  # both sides, since either may come first
    ready, _, _ = select.select([reader], [], [], limit_s)
    answer = os.read(reader, 1) if ready else b""
    os.close(reader)
    # Its children are killed too. It has nothing left to do after its answer.
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not ready:
        return TIMED_OUT
    return SURVIVED if answer == b"0" else KILLED


def _test(
    module: str, path: str, source: str, arguments: Sequence[str], examples: int, writer: int
) -> None:
    """In the child, return the first digit of pytest's exit status, and end."""
    import hypothesis
    import pytest

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.meta_path.insert(0, _Loader(module, path, source))
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("mutants")
    os.environ["GEOMETRY_EXAMPLES"] = str(examples)
    status = 1
    try:
        _fork_ranks()
        status = int(pytest.main([*_OPTIONS, *arguments]))
    finally:
        os.write(writer, str(status)[:1].encode())
        os._exit(0)


def _fork_ranks() -> None:
    from tests import pool

    pool.start_method = "fork"
    # Mutants make ranks wait for each other.
    pool.WAIT_S = 10.0
