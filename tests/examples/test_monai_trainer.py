"""The example of MONAI's trainer with split volumes."""

from __future__ import annotations

from pathlib import Path

from tests.examples import trainers

trainers.needs("monai", "ignite", "tqdm")

SMALL = ("--size", 16, "--volumes", 4)


def test_trains_as_the_sequential_network_and_goes_on(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints"
    done = trainers.train("monai_trainer", *SMALL, "--epochs", 2, "--compare", "--save", kept)
    assert done.returncode == 0, done.stderr
    assert "dice" in done.stdout
    # Once per epoch and training, not once per worker.
    assert (done.stdout + done.stderr).count("Metrics -- dice") == 4
    (file,) = kept.iterdir()
    elsewhere = ("--grid", 1, 1, 4, "--bf16")
    done = trainers.train("monai_trainer", *SMALL, *elsewhere, "--epochs", 3, "--resume", file)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("Metrics -- dice") == 1
