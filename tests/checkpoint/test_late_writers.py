"""A rank of an abandoned save wakes up and continues to write: no other save gets its values."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from gpudist import checkpoint
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.checkpoint.test_killed_saves import network
from tests.faults.ranks import Ranks

# Before a rank looks for its folder, and before it opens its file there.
MOMENTS: dict[str, tuple[Any, str]] = {
    "before the folder": (DefaultSavePlanner, "create_local_plan"),
    "before the file": (FileSystemWriter, "write_data"),
}


def filled(P_world: Partition, number: float) -> torch.nn.Module:
    net = network(P_world)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(number)
    return net


def save_and_stop(P_world: Partition, path: Path, moment: str) -> None:
    """Rank 1 stops in the middle of its save, as one whose machine swaps or is paused."""
    (owner, method), net = MOMENTS[moment], filled(P_world, 1)
    real = getattr(owner, method)

    def stopping(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args)

    with mock.patch.object(owner, method, stopping if P_world.rank == 1 else real):
        checkpoint.save(net, path)


def save_when_told(P_world: Partition, path: Path, written: Path, go: Path) -> None:
    """Rank 0 waits with its index, which it writes when all files are there, for ``go``."""
    net, real = filled(P_world, 2), FileSystemWriter.finish

    def waiting(*args: Any) -> None:
        written.touch()
        _wait_for(go)
        real(*args)

    with mock.patch.object(FileSystemWriter, "finish", waiting):
        checkpoint.save(net, path)


def assert_filled(P_world: Partition, path: Path, number: float) -> None:
    net = network(P_world)
    checkpoint.load(net, path)
    for found, expected in zip(net.parameters(), filled(P_world, number).parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("transport", ["host", "gloo"])
def test_late_rank_of_another_job_changes_nothing(
    tmp_path: Path, transport: str, moment: str
) -> None:
    path, written, go = tmp_path / "run" / "checkpoint", tmp_path / "written", tmp_path / "go"
    options: Any = {"transport": transport, "store_rank": None}
    with Ranks(2, save_and_stop, path, moment, timeout_s=2.0, **options) as stopped:
        assert stopped.answers(besides=1)[0].error is not None
        with Ranks(2, save_when_told, path, written, go, **options) as other:
            _wait_for(written)
            stopped.kill(1, signal.SIGCONT)
            late = stopped.answers(besides=0)[1].error
            go.touch()
            assert {rank: answer.error for rank, answer in other.answers().items()} == {
                0: None, 1: None
            }  # fmt: skip
        run_distributed(assert_filled, 2, path, 2.0)
        assert late is not None
    assert os.listdir(path.parent) == ["checkpoint"]


def _wait_for(sign: Path) -> None:
    deadline_s = time.monotonic() + 30
    while not sign.exists():
        assert time.monotonic() < deadline_s, f"no {sign.name} within 30 s"
        time.sleep(0.01)
