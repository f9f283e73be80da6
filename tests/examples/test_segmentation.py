"""The example that segments volumes read by blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.examples import trainers

trainers.needs("nibabel", "nilearn")

SMALL = ("--every", 8, "--size", 12, "--width", 4, "--dtype", "float64")


def rows(text: str) -> dict[str, str]:
    """Return the distributed program's value in each row of the table."""
    cells = [line.split("│") for line in text.splitlines() if "│" in line]
    return {row[1].strip(): row[2].strip() for row in cells}


def test_equals_the_sequential_network_and_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoint"
    first = ("--epochs", 1, "--save", kept, "--compare", "--tolerance", -1)
    done = trainers.train("segmentation", *SMALL, *first, ranks=2)
    assert done.returncode == 1
    for name in ("loss", "grey matter", "parameters"):
        assert f"segmentation.py: {name} differs by" in done.stderr
    whole = trainers.train("segmentation", *SMALL, "--epochs", 2, ranks=2)
    elsewhere = ("--grid", 1, 1, 2, "--epochs", 2, "--resume", kept, "--compare")
    done = trainers.train("segmentation", *SMALL, *elsewhere, ranks=2)
    assert whole.returncode == done.returncode == 0, whole.stderr + done.stderr
    losses = trainers.losses(whole)
    assert losses[len(losses) // 2 :] == trainers.losses(done)
    assert trainers.losses(done) == trainers.losses(done, "sequential")
    assert len(rows(done.stdout)) == 4 and rows(done.stdout) == rows(whole.stdout)


@pytest.mark.parametrize("kind", ["nii", "zarr", "h5", "npy"])
def test_formats(kind: str, tmp_path: Path) -> None:
    pytest.importorskip({"nii": "nibabel", "h5": "h5py"}.get(kind, kind.replace("npy", "numpy")))
    example = trainers.module("segmentation")
    cells = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    path = tmp_path / f"a.{kind}"
    example.write(path, cells)
    array = example.Files(path)[0]
    assert array.shape == cells.shape
    assert np.array_equal(array[0:1, 1:3, 2:4], cells[0:1, 1:3, 2:4])
