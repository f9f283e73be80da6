"""Memory, events and communicators of a world over the doubles of CUDA and NCCL."""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch

from gpudist import ops
from gpudist.errors import GpudistError
from gpudist.transport.base import Signature, Transport
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.nccl import clear, count, fail_device_call, inject, log, violations
from tests.transport.nccl_actions import (
    all_sum_reduce,
    backward,
    barrier,
    block_of,
    broadcast,
    halo,
    halo_of,
    overlapped,
    triples,
)
from tests.transport.worlds import collect, results

RANKS = 4
MIXED = (halo, broadcast, all_sum_reduce, backward, overlapped, triples)
ALLOCATIONS = ("allocate", "allocate_pinned", "create_stream")
PAIRS = {
    "allocate": "release",
    "allocate_pinned": "release_pinned",
    "create_stream": "destroy_stream",
    "create_event": "destroy_event",
}


def living() -> dict[str, int]:
    return {made: count(made) - count(ended) for made, ended in PAIRS.items()}


def in_steady_state(transport: Transport) -> list[str]:
    assert isinstance(transport, NcclTransport)
    P_world = runtime.world_of(transport)
    clear()
    for _ in range(10):
        for action in MIXED:
            action(P_world)
    made, held = {name: count(name) for name in ALLOCATIONS}, transport.staging_bytes
    events = living()["create_event"]
    for _ in range(34):
        for action in MIXED:
            action(P_world)
    assert {name: count(name) for name in ALLOCATIONS} == made
    assert transport.staging_bytes == held > 0
    # Those of operations that nobody has seen complete yet; the watchdog looks every 20 ms.
    assert living()["create_event"] < events + 500
    return violations()


def test_two_hundred_operators_allocate_nothing() -> None:
    assert results("nccl", RANKS, in_steady_state) == [[]] * RANKS


def grow(transport: Transport) -> list[str]:
    """A larger operator gets more memory in place of the former piece."""
    assert isinstance(transport, NcclTransport)
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    small, before = transport.staging_bytes, living()["allocate"]
    rows = 100_000
    x = torch.ones(rows, 6)
    large = halo_of(P_world, rows=rows)
    y = large(x)
    assert y.shape == (rows, 9) and torch.equal(y, torch.ones_like(y))
    assert transport.staging_bytes > max(small, rows * 3 * 4)
    # The tables of what is packed and of what is unpacked travel with the launches.
    assert living()["allocate"] == before
    assert torch.equal(halo(P_world)[:, 1:7], block_of(P_world))
    return violations()


def test_staging_grows_and_gives_back() -> None:
    assert results("nccl", 3, grow) == [[]] * 3


def grow_without_memory(transport: Transport) -> list[int]:
    """Return how many pieces were given back before a larger one was asked for again."""
    assert isinstance(transport, NcclTransport)
    pieces: list[int] = []
    with patch("torch.cuda.empty_cache", lambda: pieces.append(living()["allocate"])):
        second = runtime.connect(
            "nccl", transport.store, transport.rank, transport.size, 20.0,
            f"{transport.prefix}/grows",
        )  # fmt: skip
    P_second = runtime.world_of(second)
    halo(P_second)
    before = living()["allocate"]
    fail_device_call("allocate")
    halo_of(P_second, rows=100_000)(torch.ones(100_000, 6))
    second.close()
    return [before - left for left in pieces]


def test_staging_gives_back_before_it_asks_for_more() -> None:
    assert results("nccl", 3, grow_without_memory) == [[1]] * 3


def lack_memory(transport: Transport, failures: int) -> tuple[int, list[str]]:
    """How often torch's cache was emptied in a first halo exchange, and what it raised."""
    assert isinstance(transport, NcclTransport)
    emptied: list[bool] = []

    def empty() -> None:
        emptied.append(True)
        if failures > 1:
            fail_device_call("allocate")

    with patch("torch.cuda.empty_cache", empty):
        second = runtime.connect(
            "nccl", transport.store, transport.rank, transport.size, 20.0,
            f"{transport.prefix}/{failures}",
        )  # fmt: skip
    P_second = runtime.world_of(second)
    errors = []
    fail_device_call("allocate")
    try:
        assert torch.equal(halo(P_second)[:, 1:7], block_of(P_second))
    except GpudistError as error:
        errors.append(str(error))
    second.close()
    return len(emptied), errors


@pytest.mark.parametrize("failures", [1, 2])
def test_memory_that_torch_has_cached_is_asked_for(failures: int) -> None:
    for emptied, errors in results("nccl", 3, lack_memory, failures):
        assert emptied == 1
        assert len(errors) == failures - 1
        for error in errors:
            assert "MiB for messages on GPU 0, outside torch's memory" in error
            assert "use smaller blocks" in error


def come_and_go(transport: Transport) -> dict[str, int]:
    """Return what another world made and did not free by its end."""
    assert isinstance(transport, NcclTransport)
    collect()
    clear()
    before = {}
    for number in range(2):
        before = living()
        second = runtime.connect(
            "nccl", transport.store, transport.rank, transport.size, 20.0,
            f"{transport.prefix}/{number}",
        )  # fmt: skip
        P_second = runtime.world_of(second)
        for action in MIXED:
            action(P_second)
        second.close()
        del P_second, second
        collect()
    assert violations() == []
    return {name: left - before[name] for name, left in living().items()}


def test_a_world_that_is_gone_leaves_nothing() -> None:
    assert results("nccl", RANKS, come_and_go) == [dict.fromkeys(PAIRS, 0)] * RANKS


def calls(kind: str) -> list[str]:
    """Return the communicators of the calls of one kind, in order."""
    return [line[1] for line in log() if line[3] == kind]


def live_and_end(transport: Transport) -> tuple[int, list[str], list[str], list[str]]:
    P_world = runtime.world_of(transport)
    clear()
    for _ in range(3):
        triples(P_world)
    made = len(calls("init"))
    used = list(dict.fromkeys(line[1] for line in log() if line[3] == "all_reduce"))
    clear()
    transport.close()
    return made, used, calls("destroy"), violations() + calls("abort")


def test_communicators_are_made_once_by_members_and_end_younger_first() -> None:
    ended = results("nccl", RANKS, live_and_end)
    assert [made for made, *_ in ended] == [1, 2, 2, 1]
    for _, used, destroyed, misuses in ended:
        assert destroyed[:-1] == used[::-1], (used, destroyed)
        assert len(set(destroyed)) == len(used) + 1  # the world's own
        assert misuses == []


def fail_and_end(transport: Transport) -> tuple[list[str], list[str], list[str]]:
    P_world = runtime.world_of(transport)
    triples(P_world)
    clear()
    if transport.rank == 0:
        inject("async_error")
    with pytest.raises(GpudistError):
        barrier(P_world)
    transport.close()
    kinds = [line[3] for line in log() if line[1] != "violation"]
    return calls("abort"), kinds[kinds.index("abort") :], violations()


def test_after_a_failure_all_communicators_are_aborted_and_nothing_else() -> None:
    ended = results("nccl", RANKS, fail_and_end)
    for rank, (aborted, afterwards, misuses) in enumerate(ended):
        assert len(aborted) == len(set(aborted)) == (2 if rank in (0, 3) else 3)
        assert set(afterwards) == {"abort"}, afterwards
        assert misuses == []


def cross(transport: Transport, seeds: Sequence[int]) -> list[str]:
    """Post collectives in one group, in a different order on each rank."""
    clear()
    for seed in seeds:
        common, own = random.Random(seed), random.Random(seed * 100 + transport.rank)
        drawn = []
        for _ in range(common.randint(2, 5)):
            members = tuple(sorted(common.sample(range(RANKS), common.randint(2, RANKS))))
            kind, root = common.choice(["broadcast", "reduce"]), common.randrange(len(members))
            drawn.append((members, kind, root, common.choice([1, 1000, 40_000])))
        # Once each: those of one communicator keep the order in which they are posted.
        several = {entry[0]: entry for entry in drawn}.values()
        mine = [entry for entry in several if transport.rank in entry[0]]
        own.shuffle(mine)
        found = []
        with transport.group(Signature(f"crossing {seed}", f"{seed:016d}".encode())):
            for members, kind, root, cells in mine:
                communicator = transport.communicator(members)
                x = torch.full((cells,), float(transport.rank + 1))
                if kind == "broadcast":
                    communicator.broadcast(x, root)
                    found.append((x, float(members[root] + 1)))
                    continue
                is_root = communicator.rank == root
                y = torch.zeros(cells) if is_root else None
                communicator.reduce(x, y, root)
                if y is not None:
                    found.append((y, float(sum(members) + len(members))))
        transport.wait()
        for y, expected in found:
            assert bool((y == expected).all()), f"seed {seed}"
    return violations()


@pytest.mark.parametrize("seeds", [range(15), range(15, 30)], ids=str)
def test_groups_whose_roots_cross_do_not_block(seeds: range) -> None:
    assert results("nccl", RANKS, cross, seeds) == [[]] * RANKS


def message_beside_sums(transport: Transport) -> tuple[list[float], list[str]]:
    """Two of the ranks of a sum over all and of a sum over three also exchange a message."""
    clear()
    found = [torch.zeros(5) for _ in range(3)]
    x = torch.full((5,), float(transport.rank + 1))
    with transport.group(Signature("sums and a message", bytes(16))):
        world = transport.communicator(range(RANKS))
        world.all_reduce(x, found[0])
        if transport.rank < 3:
            transport.communicator(range(3)).all_reduce(x, found[1])
        if transport.rank == 0:
            world.send(x, RANKS - 1)
        elif transport.rank == RANKS - 1:
            world.recv(found[2], 0)
    transport.wait()
    return [float(y[0]) for y in found], violations()


def test_messages_change_no_order_of_communicators() -> None:
    """NCCL before 2.26, and the double, keep the order of a group's calls."""
    for rank, (sums, misuses) in enumerate(results("nccl", RANKS, message_beside_sums)):
        assert sums == [10.0, 6.0 if rank < 3 else 0.0, 1.0 if rank == 3 else 0.0]
        assert misuses == []


def crossing_operators(transport: Transport) -> list[str]:
    """Rows and columns of a grid, each rank a root in one and a member of another."""
    P_world: Partition = runtime.world_of(transport)
    P_grid = P_world.create_cartesian_topology_partition([2, 2])
    clear()
    x = torch.full((300, 300), float(transport.rank + 1))
    for axes in ([0], [1], [0, 1]) * 5:
        total = ops.all_sum_reduce(x, P_grid, axes)
        rank, size = transport.rank, 2
        members = {
            (0,): [rank % size, rank % size + size],
            (1,): [rank // size * size, rank // size * size + 1],
            (0, 1): range(RANKS),
        }[tuple(axes)]
        assert bool((total == sum(member + 1 for member in members)).all())
    return violations()


def test_operators_over_rows_and_columns() -> None:
    assert results("nccl", RANKS, crossing_operators) == [[]] * RANKS
