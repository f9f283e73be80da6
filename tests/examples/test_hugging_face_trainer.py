"""The example of Hugging Face's Trainer with split images."""

from __future__ import annotations

from pathlib import Path

from tests.examples import trainers

trainers.needs("accelerate", "psutil", "transformers")

SMALL = ("--size", 32, "--images", 8)


def test_trains_as_the_sequential_network_and_goes_on(tmp_path: Path) -> None:
    done = trainers.train(
        "hugging_face_trainer", *SMALL, "--epochs", 1, "--compare", "--save", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "gradient" in done.stdout
    elsewhere = ("--grid", 1, 4, "--resume", tmp_path / "checkpoint-2")
    done = trainers.train("hugging_face_trainer", *SMALL, *elsewhere, "--epochs", 2)
    assert done.returncode == 0, done.stderr
