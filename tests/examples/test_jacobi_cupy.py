"""The example of Poisson's equation, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples import trainers

EXAMPLE = trainers.ROOT / "examples" / "jacobi_cupy.py"
GRID = ("jacobi_cupy", "--grid")


@pytest.mark.parametrize(("ranks", "shape"), [(None, [1, 1]), (3, [1, 3]), (4, [2, 2])])
def test_every_bit_is_that_of_one_worker(
    tmp_path: Path, ranks: int | None, shape: list[int]
) -> None:
    file = tmp_path / "results.json"
    # 41 points: no process grid cuts them evenly.
    done = trainers.start(*GRID, 41, "--compare", "--json", file, ranks=ranks)
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
    done = trainers.start(*GRID, 20, "--steps", 3, "--json", file, ranks=None)
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
    done = trainers.python("-c", changed, "--grid", 8, "--steps", 5, "--compare")
    assert done.returncode == 1
    assert "the fields differ: 64 of 64 points differ, the first at [0, 0]" in done.stderr
    assert "every bit" not in done.stdout


def test_too_few_points() -> None:
    done = trainers.start(*GRID, 3, ranks=2)
    assert done.returncode != 0
    for rank in range(2):
        assert f"rank {rank} of 2: --grid 3 leaves workers without points" in done.stderr
    assert "at least 4" in done.stderr
