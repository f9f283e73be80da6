"""The example of Hugging Face Accelerate with split volumes."""

from __future__ import annotations

from pathlib import Path

from tests.examples import trainers

trainers.needs("accelerate", "psutil")

SMALL = ("--size", 16, "--width", 4, "--volumes", 4)


def test_trains_as_the_sequential_network_and_goes_on(tmp_path: Path) -> None:
    done = trainers.train(
        "accelerate_trainer", *SMALL, "--epochs", 2, "--compare", "--save", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    elsewhere = ("--grid", 1, 1, 4, "--resume", tmp_path)
    done = trainers.train("accelerate_trainer", *SMALL, *elsewhere, "--epochs", 3)
    assert done.returncode == 0, done.stderr
    assert "nan" not in done.stdout
