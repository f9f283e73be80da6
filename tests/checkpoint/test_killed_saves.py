"""Saves that are killed at random moments: the previous checkpoint always loads, as a whole."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import torch

from gpudist import checkpoint
from gpudist.nn import DistributedLinear
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.faults.ranks import Ranks

KILLS = 20 if EVERY else 8


def network(P_world: Partition) -> torch.nn.Sequential:
    """Linear layers, of whose weights every rank owns a block."""
    P_x, P_w = (
        P_world.create_cartesian_topology_partition(shape)
        for shape in ([1, P_world.size], [1, 1, P_world.size])
    )
    P_y = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
    return torch.nn.Sequential(*[DistributedLinear(P_x, P_y, P_w, 64, 64) for _ in range(8)])


def save_for_ever(P_world: Partition, path: Path, done: Path, first: int) -> None:
    """Save networks filled with one number each; ``done`` holds the last completed save."""
    net = network(P_world)
    number = first
    while True:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(number)
        checkpoint.save(net, path)
        if P_world.rank == 0:
            done.with_suffix(".new").write_text(str(number))
            os.rename(done.with_suffix(".new"), done)
        number += 1


def assert_whole(P_world: Partition, path: Path, done: int) -> None:
    """Check that the last save that returned loads, or the one after it."""
    net = network(P_world)
    checkpoint.load(net, path)
    found = {value for x in net.parameters() if x.numel() for value in x.unique().tolist()}
    assert len(found) == 1 and found.pop() in (done, done + 1)


def test_a_save_killed_at_any_moment_leaves_one_that_loads(tmp_path: Path) -> None:
    path, done = tmp_path / "run" / "checkpoint", tmp_path / "done"
    rng = random.Random(7)
    reached = 0
    for kill in range(KILLS):
        # As a node that goes down, or as one rank that does.
        victims = rng.choice([(0, 1), (0,), (1,)])
        with Ranks(2, save_for_ever, path, done, reached + 1) as ranks:
            _wait_for_a_save(ranks, done, reached)
            time.sleep(rng.uniform(0, 0.06))
            for victim in victims:
                ranks.kill(victim)
            if len(victims) == 1:
                errors = [answer.error for answer in ranks.answers().values()]
                assert [type(error).__name__ for error in errors] == ["PeerFailure"], (kill, errors)
        reached = int(done.read_text())
        run_distributed(assert_whole, 1 + kill % 2, path, reached)
        others = set(os.listdir(path.parent)) - {"checkpoint", ".checkpoint.previous"}
        # Each save that ended left what it wrote at most until the next.
        assert len(others) <= 1, others
        assert all(name.startswith(".checkpoint.saving.gpudist-") for name in others), others


def _wait_for_a_save(ranks: Ranks, done: Path, reached: int) -> None:
    deadline_s = time.monotonic() + 30
    while not done.exists() or int(done.read_text()) <= reached:
        assert not ranks.ends[0].poll(), ranks.answers()
        assert time.monotonic() < deadline_s, "no save returned within 30 s"
        time.sleep(0.002)
