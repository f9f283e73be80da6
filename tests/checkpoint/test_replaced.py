"""A load beside saves to the same path gives one save on every rank."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpudist import checkpoint
from gpudist.checkpoint import dcp
from gpudist.checkpoint.reader import SafeReader
from gpudist.errors import CheckpointError
from gpudist.nn import ColumnParallelLinear
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests import warm
from tests.checkpoint.one_rank import P_WORLD, Extra, Keeper


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpudist.checkpoint.dcp.world_of", lambda module: P_WORLD)


def save(path: Path, number: int) -> None:
    module = Extra(number, x=torch.full((1000,), number))
    optimizer = Keeper(module, {"m": torch.full((2, 3), float(number))}, number=number)
    checkpoint.save(module, path, optimizer)


def loaded(path: Path) -> set[float]:
    module: Any = Extra(0, x=torch.zeros(1000, dtype=torch.int64))
    optimizer = Keeper(module, None, number=0)
    checkpoint.load(module, path, optimizer)
    (state,), (group,) = optimizer.state.values(), optimizer.param_groups
    return {
        *module.x.unique().tolist(),
        *state["m"].unique().tolist(),
        module.extra,
        group["number"],
    }


# Where another job replaces the checkpoint.
MOMENTS = ["__init__", "read_metadata", "require_of_one_save", "read_data"]


@pytest.fixture(params=MOMENTS)
def replacements(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_rank: None, tmp_path: Path
) -> Iterator[list[int]]:
    """Numbers of the saves that replace a checkpoint, each during one attempt to load it."""
    waiting: list[int] = []
    method = getattr(SafeReader, request.param)

    def replaced(reader: SafeReader, *args: Any) -> Any:
        result = method(reader, *args)
        if waiting and ".saving" not in str(reader.path):
            number, waiting[:] = waiting[0], waiting[1:]
            rest, waiting[:] = waiting[:], []
            save(tmp_path / "a", number)
            waiting[:] = rest
        return result

    monkeypatch.setattr(SafeReader, request.param, replaced)
    # Files that are open already would remain readable.
    monkeypatch.setattr(SafeReader, "hold", lambda reader, names: None)
    yield waiting


def test_load_begins_again_if_the_checkpoint_is_replaced(
    replacements: list[int], tmp_path: Path
) -> None:
    save(tmp_path / "a", 1)
    replacements[:] = [2, 3]
    (number,) = loaded(tmp_path / "a")
    assert number in (1, 2, 3) and not replacements


def test_load_gives_up(
    monkeypatch: pytest.MonkeyPatch, replacements: list[int], tmp_path: Path
) -> None:
    monkeypatch.setattr(dcp, "_PAUSE_S", 0)
    monkeypatch.setattr(dcp, "_ATTEMPTS", 4)
    save(tmp_path / "a", 1)
    replacements[:] = range(2, 40)
    try:
        assert len(loaded(tmp_path / "a")) == 1
    except CheckpointError as error:
        assert "have replaced the checkpoint 4 times during the load; save less" in str(error)


def test_held_files_stay_readable(
    monkeypatch: pytest.MonkeyPatch, one_rank: None, tmp_path: Path
) -> None:
    save(tmp_path / "a", 1)
    hold = SafeReader.hold

    def replaced(reader: SafeReader, names: list[str]) -> None:
        hold(reader, names)
        monkeypatch.setattr(SafeReader, "hold", hold)
        save(tmp_path / "a", 2)

    monkeypatch.setattr(SafeReader, "hold", replaced)
    assert loaded(tmp_path / "a") == {1}
    assert loaded(tmp_path / "a") == {2}


SAVES = """
import sys
from pathlib import Path
from gpudist.checkpoint import dcp
from tests.checkpoint.one_rank import P_WORLD
from tests.checkpoint.test_replaced import save
dcp.world_of = lambda module: P_WORLD
number = 1
while True:
    number += 1
    save(Path(sys.argv[1]), number)
"""


def test_loads_beside_a_loop_of_saves(one_rank: None, tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    root = Path(__file__).resolve().parents[2]
    other = subprocess.Popen([warm.python(), "-c", SAVES, tmp_path / "a"], cwd=root)
    try:
        while loaded(tmp_path / "a") == {1}:
            assert other.poll() is None
        found = [loaded(tmp_path / "a") for _ in range(3)]
    finally:
        other.kill()
        other.wait()
    assert all(len(numbers) == 1 for numbers in found), found


def load_elsewhere(P_world: Partition, paths: list[Path]) -> None:
    assert P_world.rank is not None
    layer = ColumnParallelLinear(P_world, 4, 4)
    checkpoint.save(layer, paths[0])
    checkpoint.save(layer, paths[1])
    checkpoint.load(layer, paths[P_world.rank])


def test_ranks_that_see_other_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 1 sees another checkpoint than rank 0; every"):
        run_distributed(load_elsewhere, 2, [tmp_path / "a", tmp_path / "b"])
