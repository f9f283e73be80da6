"""The example of Poisson's equation, as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "jacobi_cupy.py"
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [warm.python(), *map(str, arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def jacobi(*arguments: object, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    """Started by torchrun, or without a launcher."""
    launch = [] if ranks is None else [*LAUNCH, ranks]
    return python(*launch, EXAMPLE, *arguments)


@pytest.mark.parametrize(("ranks", "shape"), [(None, [1, 1]), (3, [1, 3]), (4, [2, 2])])
def test_every_bit_is_that_of_one_worker(
    tmp_path: Path, ranks: int | None, shape: list[int]
) -> None:
    file = tmp_path / "results.json"
    # 41 points: no process grid cuts them evenly.
    done = jacobi("--grid", 41, "--compare", "--json", file, ranks=ranks)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert (record["ranks"], record["process_grid"]) == (ranks or 1, shape)
    assert record["difference"] is None and "every bit is that of the field" in done.stdout
    assert record["residual"] < 1e-9
    assert record["order"] == pytest.approx(2, abs=0.02)
    assert record["error"] < record["coarse_error"] < 2e-4
    assert record["seconds_per_step"] > 0 and record["sequential_seconds_per_step"] > 0
    assert "on all workers: step 328 of 328, residual" in done.stderr


def test_steps_end_the_iteration_early(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = jacobi("--grid", 20, "--steps", 3, "--json", file)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["steps"] == 3 and record["residual"] > 1e-2
    assert record["sequential_seconds_per_step"] is None
    assert "every bit" not in done.stdout


def test_a_difference_is_a_failure() -> None:
    """Alone, with a step less."""
    changed = (
        f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); import jacobi_cupy as example; "
        "alone = example.alone; "
        "example.alone = lambda grid, steps, report: alone(grid, steps - 1, report); "
        "sys.exit(example.main())"
    )
    done = python("-c", changed, "--grid", 8, "--steps", 5, "--compare")
    assert done.returncode == 1
    assert "the fields differ: 64 of 64 points differ, the first at [0, 0]" in done.stderr
    assert "every bit" not in done.stdout


def test_too_few_points() -> None:
    done = jacobi("--grid", 3, ranks=2)
    assert done.returncode != 0
    for rank in range(2):
        assert f"rank {rank} of 2: --grid 3 leaves workers without points" in done.stderr
    assert "at least 4" in done.stderr


def example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("jacobi_cupy", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jacobi_cupy", module)  # where its dataclass looks for it
        spec.loader.exec_module(module)
    return module


def test_what_counts_as_a_difference() -> None:
    difference = example().difference
    field = np.linspace(0, 1, 6).reshape(2, 3)
    assert difference(field, field.copy()) is None
    other = field.copy()
    other[1, 2] = np.nextafter(1, 2)
    assert difference(field, other) == (
        "1 of 6 points differ, the first at [1, 2], by up to 2.22e-16"
    )
    other = field.copy()
    other[0, 0] = -0.0
    assert "first at [0, 0]" in difference(field, other)
    assert "shapes" in difference(field, field[:1])


@pytest.mark.parametrize(
    ("size", "shape"), [(1, (1, 1)), (2, (1, 2)), (6, (2, 3)), (7, (1, 7)), (16, (4, 4))]
)
def test_process_grid(size: int, shape: tuple[int, int]) -> None:
    assert example().process_grid(size) == shape
