"""Remedies that the check suggests for the problems it finds."""

from __future__ import annotations

import pytest

from gpudist.cli.self_check.link_speeds import LinkSpeed, link_speeds, pairs
from gpudist.cli.self_check.remedies import (
    RankEnvironment,
    failure_remedy,
    kind_of,
    rank_environments,
    remedies_of,
)
from gpudist.world.links import GpuLink
from gpudist.world.partition import Partition
from tests.pool import distributed

NCCL = 22809
LINKS = (GpuLink(0, 1, "NV18", "18 NVLinks"), GpuLink(0, 2, "SYS", "between sockets"))


def node(*gpus: int, number: int = 1) -> list[RankEnvironment]:
    return [RankEnvironment(number, 100 * number + gpu, NCCL, gpu) for gpu in gpus]


def speed(first: int, second: int, gbps: float = 100.0, right: bool = True) -> LinkSpeed:
    return LinkSpeed(first, second, right, gbps)


FAST = [speed(0, 1), speed(0, 2), speed(1, 2)]
SLOW = [speed(0, 1), speed(0, 2, 10.0), speed(1, 2)]
WRONG = [speed(0, 1, right=False)]
OLD, P2P_OFF, IB_OFF = 22705, 1, 4


@pytest.mark.parametrize(
    ("found", "speeds", "words"),
    [
        (node(0, 1, 2), FAST, []),
        (node(0, 0), [], ["Ranks 0, 1 share one GPU"]),
        ([*node(0), RankEnvironment(2, 200, OLD)], [],
         ["NCCL is 2.28.9 on ranks 0; 2.27.5 on ranks 1: install one version"]),
        (node(0, 1), WRONG, ["Bytes were wrong between ranks 0-1: try NCCL_P2P_DISABLE=1"]),
        (node(0, 1, 2), SLOW,
         ["Ranks 0 and 2 exchange 10.0 GB/s, where 100.0 are usual, over SYS: cut tensors"]),
        ([RankEnvironment(1, 100, NCCL, 0, P2P_OFF), RankEnvironment(1, 101, NCCL, 1, P2P_OFF)], [],
         ["NCCL_P2P_DISABLE is set on ranks 0, 1, so that GPUs of one node send through"]),
        ([RankEnvironment(1, 100, NCCL, 0, P2P_OFF), RankEnvironment(2, 200, NCCL, 0, P2P_OFF)],
         [], []),
        ([RankEnvironment(1, 100, NCCL, 0, IB_OFF), RankEnvironment(2, 200, NCCL)], [],
         ["NCCL_IB_DISABLE is set on"]),
        ([RankEnvironment(1, 100, NCCL, 0, IB_OFF), RankEnvironment(1, 101, NCCL, 1)], [], []),
        ([RankEnvironment(1, 100, NCCL, 0, 0, 0b110), RankEnvironment(1, 101, NCCL, 1)], [],
         ["GPU 0 of rank 0 cannot reach the memory of GPUs 1, so that"]),
    ],
)  # fmt: skip
def test_what_is_to_be_done(
    found: list[RankEnvironment], speeds: list[LinkSpeed], words: list[str]
) -> None:
    remedies = remedies_of(found, speeds, LINKS)
    assert len(remedies) == len(words)
    for remedy, word in zip(remedies, words, strict=True):
        assert remedy.startswith(word)


def test_links_between_nodes_are_compared_with_each_other_alone() -> None:
    found = [*node(0, 1), *node(0, 1, number=2)]
    speeds = [speed(0, 1), speed(2, 3), *(speed(a, b, 10.0) for a in (0, 1) for b in (2, 3))]
    assert remedies_of(found, speeds, LINKS) == []
    assert [kind_of(s, found, LINKS) for s in speeds[:3]] == ["NV18", "NV18", "the network"]
    assert kind_of(speed(0, 1), node(1, 3), LINKS) == ""


def test_links_of_processors_are_not_told_of() -> None:
    found = [RankEnvironment(1, gpu) for gpu in range(3)]
    assert remedies_of(found, SLOW, ()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ncclCommInitRankConfig: invalid usage; Duplicate GPU detected : rank 0 and rank 1",
         "start no more processes on a node than it has GPUs"),
        ("Mismatched NCCL version detected : rank 0 2.28.9, rank 1 2.27.5", "install one"),
        ("unhandled system error (run with NCCL_DEBUG=INFO)", "too small a /dev/shm"),
        ("socketStartConnect: Connect to 10.0.0.2 failed", "NCCL_SOCKET_IFNAME"),
        ("CUDA: out of memory", "memory is full"),
        ("ranks mean different things", ""),
    ],
)  # fmt: skip
def test_a_world_that_cannot_be_joined(text: str, words: str) -> None:
    assert words in failure_remedy(text) and bool(words) == bool(failure_remedy(text))


def test_every_pair_or_every_neighbour() -> None:
    assert list(pairs(3)) == [(0, 1), (0, 2), (1, 2)]
    assert len(list(pairs(8))) == 28
    assert list(pairs(9)) == [*((rank, rank + 1) for rank in range(8)), (0, 8)]
    assert list(pairs(1)) == []


@distributed(ranks=3)
def test_every_link_is_measured(P_world: Partition) -> None:
    found = link_speeds(P_world, 4096)
    assert [(link.first, link.second) for link in found] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.right and link.gbps > 0 for link in found)
    mine = [int(link.gbps * 1e6) for link in found]
    assert P_world.allreduce_data(mine, "max") == mine


@distributed(ranks=2)
def test_every_rank_has_its_place(P_world: Partition) -> None:
    first, second = rank_environments(P_world)
    assert first.node == second.node and first.gpu != second.gpu
    assert (first.nccl > 0) == (P_world.transport == "nccl") and first.nccl == second.nccl
