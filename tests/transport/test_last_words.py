"""Ranks that one mistake ends print one traceback, and one line for each other rank."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from gpudist.transport.failure.last_words import Ending, Endings
from tests import warm
from tests.doubles import use_doubles
from tests.transport.worlds import new_store

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
START = """
import os, time, torch, gpudist
P_world = gpudist.init(timeout=20)
P_x = P_world.create_cartesian_topology_partition([1, 4])
x = torch.ones(2, 4)
gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1)))
folder = os.path.dirname(__file__)
open(f"{folder}/ready-{P_world.rank}", "w").close()
while sum(name.startswith("ready-") for name in os.listdir(folder)) < P_world.size:
    time.sleep(0.01)
"""
ENDINGS = {
    "same_mistake": "gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1), (1, 1)))",
    "other_texts": "raise ValueError(f'no shard for {P_world.rank}')",
    "exception": "if P_world.rank == 1: raise KeyError('no such shard')\nP_world.barrier()",
    "assertion": "assert P_world.rank != 1, 'no data'\nP_world.barrier()",
    "mismatch": "x = torch.ones(2, 4 + (P_world.rank == 1))\n"
    "gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1)))\nP_world.barrier()",
    "order": "P_world.barrier() if P_world.rank == 1 else P_world.allreduce_data([1])",
    "death": "if P_world.rank == 1: os.kill(os.getpid(), 9)\nP_world.barrier()",
}
TEXTS = {
    "same_mistake": "PartitionError: HaloExchange: 3 windows",
    "other_texts": "ValueError: no shard for",
    "exception": "KeyError: 'no such shard'",
    "assertion": "AssertionError: no data",
    "mismatch": r"PlanMismatch: HaloExchange: the block of rank 1 of .* agreed on as \[2, 4\]",
    "order": "PlanMismatch: ranks disagree about the operation",
    "death": "PeerFailure: ",
}


def outputs(tmp_path: Path, transport: str, program: str, **variables: str) -> list[str]:
    """Return the output of each rank; no launcher ends any of them."""
    if transport == "nccl":
        use_doubles()
    store = new_store()
    said = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GPUDIST_TRANSPORT": transport,
        "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    path = tmp_path / "program.py"
    path.write_text(START + program)
    ranks = [
        subprocess.Popen(
            [warm.python(), str(path)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **said, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables,
                 "TORCHELASTIC_ERROR_FILE": str(tmp_path / f"error-{rank}")},
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=90)[1] for rank in ranks]
    return [re.sub(r"(?m)^\[W.*\n", "", text) for text in printed]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("transport", ["host", "gloo", "nccl"])
def test_one_traceback(tmp_path: Path, transport: str, name: str) -> None:
    printed = outputs(tmp_path, transport, ENDINGS[name])
    tell = [rank for rank, text in enumerate(printed) if "Traceback" in text]
    assert len(tell) == 1, printed
    assert re.search(TEXTS[name], printed[tell[0]])
    if name in ("exception", "assertion", "mismatch"):
        assert tell == [1]
    # The last activity of each rank is more useful here than the traceback.
    assert ("has failed\n  last operations over" in printed[tell[0]]) == (
        name in ("mismatch", "order", "death")
    )
    for rank, text in enumerate(printed):
        if rank in tell or (name, rank) == ("death", 1):
            continue
        line = rf"gpudist: rank {rank} ended at program\.py:\d+ (because|with the same) .*"
        assert re.fullmatch(rf"{line}; see rank {tell[0]}'s traceback\n", text), text
    if name not in ("other_texts", "exception", "assertion"):
        # Every rank still reports to torchrun.
        failed = [rank for rank in range(RANKS) if (name, rank) != ("death", 1)]
        assert all("Traceback" in (tmp_path / f"error-{rank}").read_text() for rank in failed)


@pytest.mark.parametrize("name", ["same_mistake", "exception"])
def test_every_traceback_where_it_is_asked_for(tmp_path: Path, name: str) -> None:
    printed = outputs(tmp_path, "host", ENDINGS[name], GPUDIST_DEBUG="1")
    assert all("Traceback" in text for text in printed)


# What torch does if `python -W error` makes an error of the warning of a function that fails.
PRINTED_BY_C = """
import warnings
try:
    if P_world.rank == 1:
        warnings.simplefilter("error")
        torch.set_warn_always(True)
        torch.cholesky(-torch.eye(3))
except torch.linalg.LinAlgError:
    pass
P_world.barrier()
open(f"{folder}/passed-{P_world.rank}", "w").close()
"""


def test_an_error_that_is_printed_and_forgotten_ends_nothing(tmp_path: Path) -> None:
    printed = outputs(tmp_path, "host", PRINTED_BY_C)
    assert "UserWarning: torch.cholesky is deprecated" in printed[1]
    assert len(list(tmp_path.glob("passed-*"))) == RANKS, printed


def test_two_mistakes_are_two_tracebacks(tmp_path: Path) -> None:
    program = """
if P_world.rank == 0: raise ValueError("the first")
if P_world.rank == 1: raise TypeError("the second")
P_world.barrier()
"""
    printed = outputs(tmp_path, "host", program)
    assert "ValueError: the first" in printed[0] and "Traceback" in printed[0]
    assert "TypeError: the second" in printed[1] and "Traceback" in printed[1]
    assert all(len(text.splitlines()) == 1 for text in printed[2:]), printed


# Rank 0 is the first by the store, rank 1 by the failure that ends the waits.
ABORTS_LATE = """
from gpudist.transport.host.transport import HostTransport
abort = HostTransport.abort
def abort_late(self, failure):
    time.sleep(3.0 * (self.rank == 0))
    abort(self, failure)
HostTransport.abort = abort_late
time.sleep([0.0, 1.0, 1.5, 1.5][P_world.rank])
"""


def test_the_same_mistake_of_a_rank_that_others_heard_of_first(tmp_path: Path) -> None:
    printed = outputs(tmp_path, "host", ABORTS_LATE + ENDINGS["same_mistake"])
    assert "Traceback" in printed[0]
    line = r"gpudist: rank \d ended at program\.py:\d+ with the same PartitionError as rank 0: .*"
    for text in printed[1:]:
        assert re.fullmatch(line + r"; see rank 0's traceback\n", text), text


def test_the_mistake_that_others_heard_of_is_not_the_first_one(tmp_path: Path) -> None:
    program = """
if P_world.rank == 0: raise ValueError("the first")
if P_world.rank == 1: raise TypeError("the second")
P_world.barrier()
"""
    printed = outputs(tmp_path, "host", ABORTS_LATE + program)
    assert "ValueError: the first" in printed[0] and "TypeError: the second" in printed[1]
    line = r"gpudist: rank \d ended at program\.py:\d+ because rank 1 raised TypeError: the second"
    for text in printed[2:]:
        assert re.fullmatch(line + r"; see rank 1's traceback\n", text), text


def test_a_rank_that_keeps_its_mistake_to_itself(tmp_path: Path) -> None:
    """No rank prints the cause, so the first of the others reports what it knows."""
    program = """
from gpudist.transport.failure import last_words
last_words._PATIENCE_S = 2.0
try:
    x = torch.ones(2, 4 + (P_world.rank == 1))
    gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1)))
    P_world.barrier()
except gpudist.PlanMismatch:
    if P_world.rank != 1:
        raise
"""
    printed = outputs(tmp_path, "host", program)
    assert printed[1] == ""
    assert sum("Traceback" in text for text in printed) == 1
    assert all("PlanMismatch: HaloExchange" in printed[rank] for rank in (0, 2, 3))


class Silent:
    """Store whose server has ended."""

    def compare_set(self, *_: str) -> bytes:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_keeps_no_traceback_back() -> None:
    endings = Endings(Silent(), "world")
    mine = Ending(0, "ValueError", "no shard", "", False)
    assert endings.first(mine) is None
    assert not endings.are_announced()
    assert Endings(None, "world").first(mine) is None
