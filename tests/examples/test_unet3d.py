"""The U-Net example, as a user starts it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.examples import trainers

trainers.needs()

SMALL = ("--data", "phases", "--size", 16, "--width", 4, "--dtype", "float64")


def test_equals_the_sequential_network_and_goes_on_elsewhere(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    kept = tmp_path / "checkpoint"
    done = trainers.start(
        "unet3d", *SMALL, "--steps", 3, "--compare", "--json", first, "--save", kept, ranks=4
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(first.read_text())
    assert (record["ranks"], record["grid"]) == (4, [1, 1, 2, 2, 1])
    assert len(record["loss"]) == len(record["sequential_loss"]) == 3
    np.testing.assert_allclose(record["loss"], record["sequential_loss"], rtol=1e-9, atol=0)
    assert record["loss_difference"] < 1e-9 and record["parameter_difference"] < 1e-9
    assert record["dice"] == pytest.approx(record["sequential_dice"], abs=1e-3)
    assert "4 workers against one, after 3 steps" in done.stdout
    # From the checkpoint, on other workers: not the loss of the initial weights on that crop.
    other = ("--steps", 1, "--resume", kept, "--grid", 1, 1, 1, 1, 2, "--json", second)
    done = trainers.start("unet3d", *SMALL, *other, ranks=2)
    assert done.returncode == 0, done.stderr
    resumed = json.loads(second.read_text())
    assert resumed["grid"] == [1, 1, 1, 1, 2]
    assert resumed["loss"][0] != pytest.approx(record["loss"][0], rel=1e-3)


def test_a_difference_is_a_failure() -> None:
    done = trainers.start(
        "unet3d", *SMALL, "--steps", 1, "--compare", "--tolerance", -1, ranks=None
    )
    assert done.returncode == 1
    assert "the networks differ: a loss differs by" in done.stderr
    assert "the networks differ: the parameters differ by" in done.stderr


def test_dice_is_that_of_each_class() -> None:
    dice = trainers.module("unet3d").dice
    assert (dice([2, 0, 4, 0]), dice([1, 0, 4, 3])) == ([1.0, 1.0], [0.5, 0.0])


def test_blocks_are_read_from_the_region_alone() -> None:
    cells = np.arange(1, 1 + 6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
    share = np.where(cells % 2, np.uint8(200), np.uint8(0))
    regions = {"train": ((0, 4), (0, 4), (0, 4)), "test": ((4, 6), (0, 4), (0, 4))}
    volume = trainers.module("volumes").Volume(("even", "odd"), cells, [share], regions)
    block = (slice(0, 4), slice(0, 2), slice(1, 4))
    x, classes = volume.read("train", (0, 0, 0), block)
    assert x.shape == (1, 1, 4, 2, 3) and classes.shape == (1, 4, 2, 3)
    assert torch.equal(128 * x[0, 0], torch.from_numpy(cells[:4, :2, 1:]).float())
    assert torch.equal(classes[0], torch.from_numpy(cells[:4, :2, 1:] % 2).long())
    # Around the test's region, which is narrower than the crop, there is nothing to be seen.
    corner = volume.random_corner("test", 4, torch.Generator().manual_seed(0))
    assert corner == (3, 0, 0)
    x, classes = volume.read("test", corner, (slice(0, 4),) * 3)
    assert torch.equal(128 * x[0, 0, 1:3], torch.from_numpy(cells[4:]).float())
    assert not x[0, 0, [0, 3]].any() and not classes[0, [0, 3]].any()
    assert not volume.read("test", corner, (slice(0, 1), slice(0, 4), slice(0, 4)))[0].any()
    assert volume.corners("train", 3, 4) == [(a, b, 0) for a in (0, 1) for b in (0, 1)]
    assert volume.corners("train", 3, 8) == [
        (a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)
    ]


def test_the_phases_are_the_same_for_everyone(tmp_path: Path) -> None:
    volumes = trainers.module("volumes")
    parts: list[np.ndarray] = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        volumes.write_phases(folder, 16, seed=3)
        parts.append(np.asarray(volumes.phases(folder).shares[0]))
    assert np.array_equal(parts[0], parts[1])
    assert set(np.unique(parts[0])) == {0, 255} and 0.05 < (parts[0] > 0).mean() < 0.95


def test_the_brain() -> None:
    pytest.importorskip("nibabel", reason="the template is read with nibabel")
    if importlib.util.find_spec("nilearn") is None:
        pytest.skip("the template comes with nilearn")
    volume = trainers.module("volumes").brain()
    assert volume.regions["train"] == ((0, 98), (0, 233), (0, 189))
    assert volume.regions["test"] == ((98, 197), (0, 233), (0, 189))
    x, classes = volume.read("train", (40, 80, 60), (slice(0, 32),) * 3)
    counts = classes.flatten().bincount(minlength=3)
    assert counts.min() > 1000 and 0 < x.max() < 2
    # White matter is brighter in T1.
    assert x[0][classes == 2].mean() > x[0][classes == 1].mean() + 0.1
