"""The example of nnU-Net's trainer with split patches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import trainers

trainers.needs(
    "nnunetv2",
    "acvl_utils",
    "batchgenerators",
    "batchgeneratorsv2",
    "blosc2",
    "dynamic_network_architectures",
    "monai",
    "nibabel",
    "SimpleITK",
)

SMALL = ("--size", 16, "--steps", 2)


def test_trains_as_the_sequential_network_and_goes_on(tmp_path: Path) -> None:
    folder = ("--folder", tmp_path)
    done = trainers.train("nnunet_trainer", *SMALL, *folder, "--epochs", 2, "--compare")
    assert done.returncode == 0, done.stderr
    assert len(trainers.losses(done)) == len(trainers.losses(done, "sequential")) == 4
    assert "validation loss" in done.stdout and "dice" in done.stdout
    assert done.stdout.count("Pseudo dice") == 4
    # On another grid: one more epoch.
    elsewhere = ("--grid", 1, 2, 2, "--bf16", "--resume")
    done = trainers.train("nnunet_trainer", *SMALL, *folder, *elsewhere, "--epochs", 3)
    assert done.returncode == 0, done.stderr
    assert len(trainers.losses(done)) == 2


def test_windows_are_those_of_the_sequential_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("nnUNet_def_n_proc", "1")
    options = (*SMALL, "--folder", tmp_path, "--epochs", 1, "--compare", "--predict")
    done = trainers.train("nnunet_trainer", *options)
    assert done.returncode == 0, done.stderr
    assert "dice of windows" in done.stdout
    # Every image once by rank 0, and once by the sequential network.
    assert done.stdout.count("predicting ball_") == 12
