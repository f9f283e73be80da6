"""The example of PyTorch Lightning with split volumes."""

from __future__ import annotations

from pathlib import Path

from tests.examples import trainers

trainers.needs("lightning", "lightning_utilities", "torchmetrics", "tqdm")

SMALL = ("--size", 16, "--width", 4, "--volumes", 4)


def test_trains_as_the_sequential_network_and_goes_on(tmp_path: Path) -> None:
    done = trainers.train(
        "lightning_trainer", *SMALL, "--epochs", 2, "--compare", "--save", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "dice" in done.stdout
    (log,) = tmp_path.rglob("metrics.csv")
    # One line for each step and each epoch's validation.
    assert len(log.read_text().splitlines()) == 1 + 4 + 2
    elsewhere = ("--grid", 1, 1, 4, "--bf16", "--resume", tmp_path / "last.ckpt")
    done = trainers.train("lightning_trainer", *SMALL, *elsewhere, "--epochs", 3)
    assert done.returncode == 0, done.stderr
    assert "Epoch 2/2" in done.stdout + done.stderr
