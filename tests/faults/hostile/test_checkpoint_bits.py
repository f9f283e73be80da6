"""Every flipped bit of a checkpoint is found, or changes nothing that is loaded."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpudist import checkpoint
from gpudist.checkpoint.reader import METADATA
from gpudist.checkpoint.seal import unseal
from gpudist.errors import CheckpointError
from gpudist.nn import ColumnParallelLinear
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.checkpoint.one_rank import P_WORLD, Extra, Keeper, same


def network(P_world: Partition, seed: int) -> tuple[torch.nn.Sequential, Keeper]:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(ColumnParallelLinear(P_world, 4, 6), Extra({"n": [seed, "a"]}))
    optimizer = Keeper(module, None, schedule={"warm": seed})
    for parameter in module.parameters() if seed else ():
        optimizer.state[parameter] = {"m": torch.randn_like(parameter), "step": torch.tensor(3.0)}
    return module, optimizer


def save(P_world: Partition, path: Path) -> None:
    module, optimizer = network(P_world, 5)
    checkpoint.save(module, path, optimizer)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpudist.checkpoint.dcp.world_of", lambda module: P_WORLD)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bits") / "checkpoint"
    run_distributed(save, 2, path)
    return path


def loaded(path: Path) -> Any:
    """Return what a world of one rank loads, or ``None`` if it refuses the checkpoint."""
    module, optimizer = network(P_WORLD, 0)
    try:
        checkpoint.load(module, path, optimizer)
    except CheckpointError:
        return None
    return copy.deepcopy((dict(module.state_dict()), optimizer.state_dict()))


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp", "__1_0.distcp"])
def test_no_flipped_bit_is_silent(saved: Path, name: str) -> None:
    file, expected = saved / name, loaded(saved)
    assert expected is not None
    whole, draw, refused = file.read_bytes(), random.Random(name), 0
    flips = 1000 if name == METADATA else 100
    try:
        for flip in range(flips):
            at, bit = draw.randrange(len(whole)), draw.randrange(8)
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            file.write_bytes(changed)
            found = loaded(saved)
            assert found is None or same(found, expected), f"{flip}: bit {bit} of byte {at}"
            refused += found is None
    finally:
        file.write_bytes(whole)
    # A part of the zip format of the values, which are few, has no meaning.
    assert refused == flips or (name != METADATA and refused > flips // 3)


def test_every_byte_of_the_index_counts(saved: Path) -> None:
    data = (saved / METADATA).read_bytes()
    index, is_sealed = unseal(data)
    assert is_sealed and data.startswith(index) and pickle.loads(data) == pickle.loads(index)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            assert unseal(changed) == (changed, False)
        except CheckpointError:
            continue
        # A damaged checksum remains behind the pickle, which the reader refuses.
        assert at >= len(index)


@pytest.mark.parametrize("cut", [1, 30, 55, 57, 200])
def test_shortened_index_is_refused(saved: Path, cut: int) -> None:
    file = saved / METADATA
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-cut])
        assert loaded(saved) is None
    finally:
        file.write_bytes(whole)


def test_index_without_checksum_loads_with_a_warning(saved: Path) -> None:
    """Earlier versions wrote such an index."""
    file, expected = saved / METADATA, loaded(saved)
    whole = file.read_bytes()
    try:
        file.write_bytes(unseal(whole)[0])
        with pytest.warns(UserWarning, match="has no checksum: damage to it may") as warnings:
            assert same(loaded(saved), expected)
        assert [Path(warning.filename) for warning in warnings] == [Path(__file__)]
    finally:
        file.write_bytes(whole)
