"""All files of a checkpoint belong to one save: a file of another save is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest

from gpudist.checkpoint import folders
from gpudist.checkpoint.reader import METADATA, SafeReader
from gpudist.errors import CheckpointError
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.checkpoint.test_dcp import assert_loads, assert_refused_unchanged, make, save
from tests.pool import distributed


@distributed(ranks=3, transports=("loopback", "host", "gloo"))
def test_file_of_another_save_is_named_on_every_rank(P_world: Partition, tmp_path: Path) -> None:
    """The files come from the same model, so that only values differ; nothing changes."""
    path, other = tmp_path / "checkpoint", tmp_path / "of another job"
    save(P_world, path, (2, "features"), seed=1)
    save(P_world, other, (2, "features"), seed=2)
    if P_world.rank == 0:
        (other / "__1_0.distcp").replace(path / "__1_0.distcp")
    P_world.barrier()
    model, optimizer, _, _ = make(P_world, (2, "features"), seed=3)
    words = r"__1_0\.distcp belongs to save gpudist-\w+, but the index to save gpudist-\w+"
    assert_refused_unchanged(model, str(path), optimizer, words)
    if P_world.rank == 0:
        (path / "__1_0.distcp").write_bytes(b"PK")
    P_world.barrier()
    words = r"__1_0\.distcp belongs to no save that it names, but the index to save"
    assert_refused_unchanged(model, str(path), optimizer, words)


def test_file_of_another_save_is_not_put_in_place(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    run_distributed(save, 2, target, (2, "features"), 1)

    require_of_one_save = SafeReader.require_of_one_save

    def mixed(reader: SafeReader, *rest: Any) -> None:
        mixture = Path(reader.path) / "__1_0.distcp"
        mixture.write_bytes((target / mixture.name).read_bytes())
        require_of_one_save(reader, *rest)

    with (
        mock.patch.object(SafeReader, "require_of_one_save", mixed),
        pytest.raises(CheckpointError, match=r"rank 0: .*__1_0\.distcp belongs to save"),
    ):
        run_distributed(save, 2, target, (2, "features"), 2)
    run_distributed(assert_loads, 2, target, (2, "features"), 1)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_checkpoint_without_identity_loads(tmp_path: Path) -> None:
    """Load a checkpoint from before saves had an identity."""
    target = tmp_path / "checkpoint"
    with (
        mock.patch("gpudist.checkpoint.dcp.first_bytes", lambda _: b""),
        mock.patch("gpudist.checkpoint.folders.new_identity", lambda: str(uuid4())),
    ):
        run_distributed(save, 2, target, (2, "features"), 1)
    assert (target / "__1_0.distcp").read_bytes().startswith(b"PK")
    run_distributed(assert_loads, 3, target, (2, "channels"), 1)


def test_save_that_wakes_with_its_renames_leaves_the_one_in_place(tmp_path: Path) -> None:
    """Another has removed its folder, and put its own in place."""
    target, sync = tmp_path / "checkpoint", folders._sync

    def written(name: str) -> str:
        identity = folders.prepare(target)
        (folders.writing_folder(target, identity) / METADATA).write_text(name)
        return identity

    def stopped(folder: Path) -> None:
        with mock.patch("gpudist.checkpoint.folders._sync", sync):
            folders.put_in_place(target, written("other"))

    late = written("late")
    with (
        mock.patch("gpudist.checkpoint.folders._sync", stopped),
        pytest.raises(FileNotFoundError, match=late),
    ):
        folders.put_in_place(target, late)
    assert (folders.find(target) / METADATA).read_text() == "other"
    assert os.listdir(tmp_path) == ["checkpoint"]
