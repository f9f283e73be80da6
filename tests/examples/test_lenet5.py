"""The LeNet-5 example, as a user starts it."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import trainers

trainers.needs("sklearn")

MNIST = trainers.ROOT.parent / "shared" / "data" / "mnist"
KEYS = {
    "accuracy",
    "sequential_accuracy",
    "loss",
    "sequential_loss",
    "seconds_per_step",
    "sequential_seconds_per_step",
}


def compared(tmp_path: Path, data: object, steps: int) -> dict[str, Any]:
    """Return the record of a comparison in float64, which must have found the networks equal."""
    file = tmp_path / "results.json"
    options = ("--compare", "--dtype", "float64", "--steps", steps, "--json", file)
    done = trainers.start("lenet5", "--data", data, *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record.keys() >= KEYS
    assert len(record["loss"]) == len(record["sequential_loss"]) == steps
    np.testing.assert_allclose(record["loss"], record["sequential_loss"], rtol=1e-9, atol=0)
    assert record["accuracy"] == pytest.approx(record["sequential_accuracy"], abs=0.5)
    assert record["seconds_per_step"] > 0 and record["sequential_seconds_per_step"] > 0
    assert all(size in done.stdout for size in ("60 x 200", "42 x 60", "5 x 42"))
    return record


def test_digits_match_the_sequential_network(tmp_path: Path) -> None:
    # 1437 images: the sixth step ends the first epoch, with the smaller batch.
    record = compared(tmp_path, "digits", steps=8)
    assert record["loss"][7] < record["loss"][0]


def test_mnist_matches_the_sequential_network(tmp_path: Path) -> None:
    if not MNIST.is_dir():
        pytest.skip(f"MNIST is not in {MNIST}")
    compared(tmp_path, MNIST, steps=3)


def test_a_difference_is_a_failure() -> None:
    done = trainers.start("lenet5", "--compare", "--steps", 1, "--tolerance", -1)
    assert done.returncode != 0
    assert "the networks differ: the accuracies differ by" in done.stderr


def test_wrong_number_of_workers() -> None:
    done = trainers.start("lenet5", ranks=2)
    assert done.returncode != 0
    for rank in range(2):
        assert f"rank {rank} of 2: the network is cut for 4 workers" in done.stderr


def test_without_a_launcher() -> None:
    done = trainers.start("lenet5", "--data", "digits", ranks=None)
    assert done.returncode == 2
    assert (
        "torchrun --standalone --nproc-per-node 4 examples/lenet5.py --data digits" in done.stderr
    )


def compare(loss: list[float], dtype: torch.dtype, accuracy: float = 98.0) -> list[str]:
    comparison = trainers.module("comparison")
    ours = comparison.Result(accuracy, loss, 0.1)
    theirs = comparison.Result(98.0, [1.0] * len(loss), 0.1)
    return comparison.disagreements(ours, theirs, dtype, tolerance=0.4)


def test_what_counts_as_a_difference() -> None:
    wide, narrow = torch.float64, torch.float32
    assert compare([1.0, 1.0 + 5e-10], wide) == []
    assert "differs by 2.00e-09" in compare([1.0, 1.0 + 2e-9], wide)[0]
    assert "differs by inf" in compare([math.nan, 1.0], wide)[0]
    assert compare([1.0, 1.1], narrow) == []
    assert compare([1.0] * 50 + [2.0], wide) == []
    assert compare([1.0] * 49 + [2.0], wide) != []
    assert compare([1.0], narrow, accuracy=97.7) == []
    assert "differ by 0.50 points" in compare([1.0], narrow, accuracy=97.5)[0]


IMAGES, LABELS = "images-idx3-ubyte.gz", "labels-idx1-ubyte.gz"


def idx(*extents: int, magic: int | None = None, cells: int | None = None) -> bytes:
    header = np.array([magic if magic is not None else 0x800 + len(extents), *extents], ">u4")
    return header.tobytes() + bytes(int(np.prod(extents)) if cells is None else cells)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (f"train-{IMAGES}", None, "cannot be read"),
        (f"train-{IMAGES}", idx(2, 28, 28, magic=0x801), "starts with 0x00000801, not 0x00000803"),
        (f"train-{IMAGES}", idx(2, 28, 28, cells=9), "holds 9 cells"),
        (f"train-{IMAGES}", idx(2, 28, 27), "28 x 27 pixels, not 28 x 28"),
        (f"train-{IMAGES}", b"abc", "3 of 16 bytes"),
        (f"t10k-{LABELS}", idx(3), "2 t10k images but 3 labels"),
    ],
)
def test_damaged_mnist(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-{IMAGES}").write_bytes(gzip.compress(idx(2, 28, 28)))
        (tmp_path / f"{part}-{LABELS}").write_bytes(gzip.compress(idx(2)))
    (tmp_path / name).write_bytes(gzip.compress(content) if content is not None else b"no gzip")
    digits = trainers.module("digits")
    with pytest.raises(digits.DataError, match=message):
        digits.load(str(tmp_path))
