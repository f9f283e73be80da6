"""Start an example as a user does, or import it.

``python -m tests.examples.trainers FILE ARGUMENTS`` is ``python FILE ARGUMENTS`` for packages that
import torchvision, whose wheel cannot load its operators beside a torch for the CPU.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.zoo.operators import declare_missing_operators

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# Examples that import what another one does, whose processes they fork too.
LIKE = {"monai_bundle": "monai_trainer"}


def needs(*packages: str) -> None:
    """Skip the tests of a module if a package is missing; all are given by the name imported."""
    missing = [name for name in ("rich", *packages) if util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)


def module(name: str) -> Any:
    """Return a module of the examples, which are not a package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return import_module(name)


def python(*arguments: object, server: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python in the root of the repository."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "80"}
    return subprocess.run(
        [server or warm.python(), *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def start(
    example: str, *arguments: object, ranks: int | None = 4
) -> subprocess.CompletedProcess[str]:
    """Run an example by torchrun, or without a launcher."""
    launch = [] if ranks is None else [*LAUNCH, ranks]
    return python(*launch, f"examples/{example}.py", *arguments)


def train(example: str, *arguments: object, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    """Run an example that uses other packages."""
    server = warm.python(f"examples/{LIKE.get(example, example)}.py")
    program = ["-m", "tests.examples.trainers", f"examples/{example}.py"]
    return python(*LAUNCH, ranks, *program, *arguments, server=server)


def losses(done: subprocess.CompletedProcess[str], name: str = "split") -> list[float]:
    """Return the losses that the progress of a run reports on standard error."""
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{name}: step ")]
    return [float(line.split()[-1]) for line in lines]


def run(script: str, name: str = "__main__") -> None:
    declare_missing_operators()
    sys.path.insert(0, str(Path(script).parent.resolve()))
    runpy.run_path(script, run_name=name)


if __name__ == "__main__":
    del sys.argv[0]
    run(sys.argv[0])
