"""A checkpoint at a symbolic link is saved to the link's target, and the link stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpudist import checkpoint
from gpudist.errors import CheckpointError
from gpudist.world.partition import Partition
from tests.checkpoint.test_dcp import assert_loads, save
from tests.pool import distributed


@pytest.mark.parametrize("is_there", [True, False])
@distributed(ranks=2, transports=("loopback", "host", "gloo"))
def test_symbolic_link_stays(P_world: Partition, tmp_path: Path, is_there: bool) -> None:
    """A link stays a link, also if it points to a link or to a missing folder."""
    link, target = tmp_path / "latest", tmp_path / "disk" / "runs" / "17"
    if P_world.rank == 0:
        link.symlink_to("next")
        (tmp_path / "next").symlink_to(target)
        if is_there:
            target.mkdir(parents=True)
    P_world.barrier()
    for seed in (1, 2, 3):
        save(P_world, link, (2, "features"), seed)
        assert_loads(P_world, target, (2, "channels"), seed)
        assert_loads(P_world, link, (2, "channels"), seed)
    P_world.barrier()
    assert os.readlink(link) == "next" and checkpoint.exists(link)
    assert os.listdir(target.parent) == ["17"]
    assert sorted(os.listdir(tmp_path)) == ["disk", "latest", "next"]
    P_world.barrier()
    if P_world.rank == 0:
        # A save that ended between the renames.
        target.rename(target.with_name(".17.previous"))
    P_world.barrier()
    assert_loads(P_world, link, (2, "features"), 3)


@distributed(ranks=2, transports=("loopback", "host"))
def test_symbolic_link_to_itself_is_refused(P_world: Partition, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    if P_world.rank == 0:
        link.symlink_to("latest")
    P_world.barrier()
    for use in (save, assert_loads):
        with pytest.raises(CheckpointError, match=r"latest is a symbolic link that leads to it"):
            use(P_world, link, (2, "features"))
    assert not checkpoint.exists(link)


@distributed(ranks=2, transports=("loopback",))
def test_a_name_that_no_path_can_have(P_world: Partition, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"runs.x00' is not a path: embedded null byte"):
        save(P_world, tmp_path / "runs\0", (2, "features"), 1)
    assert not checkpoint.exists(tmp_path / "runs\0")
