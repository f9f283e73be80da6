"""The examples of trainers train as the sequential network, and go on elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.examples import trainers

VOLUMES = ("--size", 16, "--width", 4, "--volumes", 4)


def trained(example: str, *options: object) -> str:
    done = trainers.train(example, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_accelerate(tmp_path: Path) -> None:
    trainers.needs("accelerate", "psutil")
    first = (*VOLUMES, "--epochs", 2, "--compare", "--save", tmp_path)
    assert "loss" in trained("accelerate_trainer", *first)
    elsewhere = ("--grid", 1, 1, 4, "--resume", tmp_path, "--epochs", 3)
    assert "nan" not in trained("accelerate_trainer", *VOLUMES, *elsewhere)


def test_hugging_face(tmp_path: Path) -> None:
    trainers.needs("accelerate", "psutil", "transformers")
    images = ("--size", 32, "--images", 8)
    first = (*images, "--epochs", 1, "--compare", "--save", tmp_path)
    assert "gradient" in trained("hugging_face_trainer", *first)
    elsewhere = ("--grid", 1, 4, "--resume", tmp_path / "checkpoint-2", "--epochs", 2)
    trained("hugging_face_trainer", *images, *elsewhere)


def test_lightning(tmp_path: Path) -> None:
    trainers.needs("lightning", "lightning_utilities", "torchmetrics", "tqdm")
    first = (*VOLUMES, "--epochs", 2, "--compare", "--save", tmp_path)
    assert "dice" in trained("lightning_trainer", *first)
    (log,) = tmp_path.rglob("metrics.csv")
    # One line for each step and each epoch's validation.
    assert len(log.read_text().splitlines()) == 1 + 4 + 2
    elsewhere = ("--grid", 1, 1, 4, "--bf16", "--resume", tmp_path / "last.ckpt", "--epochs", 3)
    assert "Epoch 2/2" in trained("lightning_trainer", *VOLUMES, *elsewhere)


def test_monai(tmp_path: Path) -> None:
    trainers.needs("monai", "ignite", "tqdm")
    small, kept = ("--size", 16, "--volumes", 4), tmp_path / "checkpoints"
    # Once per epoch and training, not once per worker.
    found = trained("monai_trainer", *small, "--epochs", 2, "--compare", "--save", kept)
    assert found.count("Metrics -- dice") == 4
    (file,) = kept.iterdir()
    elsewhere = ("--grid", 1, 1, 4, "--bf16", "--epochs", 3, "--resume", file)
    assert trained("monai_trainer", *small, *elsewhere).count("Metrics -- dice") == 1
