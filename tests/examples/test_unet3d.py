"""The U-Net example, as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import warm

pytest.importorskip("rich", reason="the example prints with rich: pip install 'gpudist[examples]'")

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SMALL = ("--data", "phases", "--size", 16, "--width", 4, "--dtype", "float64")


def unet3d(*arguments: object, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    """Started by torchrun, or without a launcher."""
    launch = [] if ranks is None else [*LAUNCH, ranks]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [warm.python(), *map(str, (*launch, "examples/unet3d.py", *arguments))],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_equals_the_sequential_network_and_goes_on_elsewhere(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    kept = tmp_path / "checkpoint"
    done = unet3d(*SMALL, "--steps", 3, "--compare", "--json", first, "--save", kept, ranks=4)
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
    done = unet3d(*SMALL, *other, ranks=2)
    assert done.returncode == 0, done.stderr
    resumed = json.loads(second.read_text())
    assert resumed["grid"] == [1, 1, 1, 1, 2]
    assert resumed["loss"][0] != pytest.approx(record["loss"][0], rel=1e-3)


def test_a_difference_is_a_failure() -> None:
    done = unet3d(*SMALL, "--steps", 1, "--compare", "--tolerance", -1)
    assert done.returncode == 1
    assert "the networks differ: a loss differs by" in done.stderr
    assert "the networks differ: the parameters differ by" in done.stderr


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of the examples, which are not a package."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name in ("unet3d", "volumes", "networks", "comparison"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        (1, (1, 1, 1)),
        (2, (2, 1, 1)),
        (4, (2, 2, 1)),
        (6, (3, 2, 1)),
        (7, (7, 1, 1)),
        (12, (3, 2, 2)),
    ],
)
def test_process_grid(examples: Any, size: int, grid: tuple[int, ...]) -> None:
    assert examples("unet3d").process_grid(size) == (1, 1, *grid)


def test_what_counts_as_a_difference(examples: Any) -> None:
    example = examples("unet3d")
    one, other = example.Result([1.0, 2.0], [1.0], 0.1), example.Result([1.0, 2.02], [1.0], 0.1)
    assert example.differences(one, one, 0.0, 1e-9) == (0.0, [])
    assert example.differences(one, one, 1e-8, 1e-9)[1][0].startswith("the parameters differ by")
    assert example.differences(other, one, 0.0, 0.009)[1][0].startswith(
        "a loss differs by 1.00e-02"
    )
    broken = example.Result([math.nan, 2.0], [1.0], 0.1)
    assert example.differences(broken, one, 0.0, 1.0)[1] != []
    assert example.dice([2, 0, 4, 0]) == [1.0, 1.0]
    assert example.dice([1, 0, 4, 3]) == [0.5, 0.0]


def test_blocks_are_read_from_the_region_alone(examples: Any) -> None:
    cells = np.arange(1, 1 + 6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
    share = np.where(cells % 2, np.uint8(200), np.uint8(0))
    regions = {"train": ((0, 4), (0, 4), (0, 4)), "test": ((4, 6), (0, 4), (0, 4))}
    volume = examples("volumes").Volume(("even", "odd"), cells, [share], regions)
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


def test_the_phases_are_the_same_for_everyone(examples: Any, tmp_path: Path) -> None:
    volumes = examples("volumes")
    parts: list[np.ndarray] = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        volumes.write_phases(folder, 16, seed=3)
        parts.append(np.asarray(volumes.phases(folder).shares[0]))
    assert np.array_equal(parts[0], parts[1])
    assert set(np.unique(parts[0])) == {0, 255} and 0.05 < (parts[0] > 0).mean() < 0.95


def test_the_brain(examples: Any) -> None:
    pytest.importorskip("nibabel", reason="the template is read with nibabel")
    if importlib.util.find_spec("nilearn") is None:
        pytest.skip("the template comes with nilearn")
    volume = examples("volumes").brain()
    assert volume.regions["train"] == ((0, 98), (0, 233), (0, 189))
    assert volume.regions["test"] == ((98, 197), (0, 233), (0, 189))
    x, classes = volume.read("train", (40, 80, 60), (slice(0, 32),) * 3)
    counts = classes.flatten().bincount(minlength=3)
    assert counts.min() > 1000 and 0 < x.max() < 2
    # White matter is brighter in T1.
    assert x[0][classes == 2].mean() > x[0][classes == 1].mean() + 0.1
