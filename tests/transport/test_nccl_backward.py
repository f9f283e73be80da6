"""Backward passes of any thread over NCCL, over the doubles of CUDA and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpudist.transport.base import Signature, Transport
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.nccl import clear, violations
from tests.transport.nccl_actions import backward, halo, overlapped
from tests.transport.worlds import results

RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    results("nccl", RANKS, Transport.check, timeout_s=60.0)


def verb(P_world: Partition) -> None:
    with P_world.wire.group(Signature("a sum", bytes(16))):
        P_world.wire.communicator(range(RANKS)).all_reduce(torch.ones(2), torch.ones(2))


def in_a_new_thread(transport: Transport, action: Callable[[Partition], object]) -> list[bool]:
    """Return whether a thread's backward passes may use other threads, before and after."""
    P_world = runtime.world_of(transport)
    clear()

    def body() -> list[bool]:
        before = torch.autograd.is_multithreading_enabled()
        action(P_world)
        return [before, torch.autograd.is_multithreading_enabled()]

    halo(P_world)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(body).result()
    assert violations() == []
    return found


@pytest.mark.parametrize("action", [halo, backward, overlapped, verb])
def test_a_thread_keeps_its_backward(action: Callable[[Partition], object]) -> None:
    assert results("nccl", RANKS, in_a_new_thread, action) == [[True, False]] * RANKS
