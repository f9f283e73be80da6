"""Threads of one rank: one at a time is right, two at once are refused on every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpudist
from gpudist import checkpoint
from gpudist.errors import GpudistError
from gpudist.exchange import carry, start
from gpudist.transport.base import Signature
from gpudist.world.partition import Partition
from tests.doubles.ranks import run_all
from tests.pool import distributed

THREADS = 4
CALLS = 200


def _in_thread(run: Callable[[], Any]) -> Any:
    """Return the result of ``run()`` in another thread, or raise its error."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((run(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@pytest.mark.parametrize("operation", ["halo", "data"])
@distributed(ranks=2)
def test_threads_at_once_end_the_world(P_world: Partition, operation: str) -> None:
    P = P_world.create_cartesian_topology_partition([P_world.size])
    gpudist.halo_exchange(torch.zeros(8), P, halo=((1, 1),))
    P_world.allgather_data([0])
    errors: list[BaseException] = []

    def call(value: int) -> None:
        if operation == "data":
            P_world.allgather_data([value])
        else:
            gpudist.halo_exchange(torch.full((8,), float(value)), P, halo=((1, 1),))

    def body(thread: int) -> None:
        try:
            for i in range(CALLS):
                call(thread * CALLS + i)
        except GpudistError as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any("two threads of rank" in str(error) for error in errors), errors[0]
    with pytest.raises(GpudistError):
        P_world.barrier()


@distributed(ranks=2)
def test_a_thread_inside_a_group_keeps_others_out(P_world: Partition) -> None:
    """Even where it does not wait, so that nothing but the rule could tell."""
    if P_world.rank == 0:
        signature = Signature.of("a group of the main thread")
        with (
            pytest.raises(GpudistError, match="two threads of rank 0"),
            P_world.wire.group(signature),
        ):
            _in_thread(lambda: P_world.allgather_data([1]))
    with pytest.raises(GpudistError, match="two threads of rank 0"):
        P_world.allgather_data([1])


@distributed(ranks=1, transports=("host", "nccl"))
def test_stages_bound_by_two_threads_at_once_stay(P_world: Partition) -> None:
    """A step that exchanges nothing may run in several threads, and none lets go of a stage."""
    wire = P_world.wire
    P = P_world.create_cartesian_topology_partition([1])
    bind, barrier = wire.bind_stage, threading.Barrier(2)

    def bind_together(*arguments: Any) -> Any:
        made = bind(*arguments)
        barrier.wait(30.0)
        return made

    wire.bind_stage = bind_together  # pyright: ignore[reportAttributeAccessIssue]
    try:
        movement = gpudist.ops.HaloExchange(P, halo=((1, 1),), periodic=True).movement
        bound = movement(torch.ones(8))
        (steps,) = carry._bind(bound, ())
        results = run_all([lambda: steps.run([torch.ones(8)])] * 2)
    finally:
        del wire.bind_stage
    assert all(torch.equal(y, torch.ones(10)) for (y,) in results)
    (stage,) = bound.steps[0].bound.values()
    assert bound.steps[0].bind((1,)) is stage


@distributed(ranks=2, transports=("host",))
def test_what_is_dropped_unfinished_waits_for_no_lock_of_pythons(P_world: Partition) -> None:
    """The thread inside needs Python's lock to leave."""
    P = P_world.create_cartesian_topology_partition([P_world.size])
    operator = gpudist.ops.HaloExchange(P, halo=((1, 1),))
    x = torch.ones(8)
    held = [start([operator.movement(x)], [x])]
    P_world.barrier()
    if P_world.rank == 0:

        def drop() -> None:
            with pytest.raises(GpudistError, match="two threads of rank 0"):
                held[0].wait(0)
            held.clear()

        signature = Signature.of("a group of the main thread")
        with pytest.raises(GpudistError), P_world.wire.group(signature):
            thread = threading.Thread(target=drop)
            thread.start()
            time.sleep(0.3)
            P_world.wire.check()
        thread.join()
    else:
        with pytest.raises(GpudistError):
            held[0].wait(0)
            P_world.barrier()


@distributed(ranks=2)
def test_one_thread_after_another_is_right(P_world: Partition) -> None:
    P = P_world.create_cartesian_topology_partition([P_world.size])
    x = torch.arange(4.0) + 4 * P_world.plan_rank
    x.requires_grad_()
    here = gpudist.halo_exchange(x, P, halo=((1, 1),))
    there = _in_thread(lambda: gpudist.halo_exchange(x, P, halo=((1, 1),)))
    assert torch.equal(here, there)
    (expected,) = torch.autograd.grad(here.sum(), x)
    (found,) = _in_thread(lambda: torch.autograd.grad(there.sum(), x))
    assert torch.equal(found, expected)


@distributed(ranks=2, transports=("host", "gloo", "nccl"))
def test_a_checkpoint_is_written_beside_operators(P_world: Partition, tmp_path: Path) -> None:
    """The state is gathered first; a thread writes it while operators go on."""
    P = P_world.create_cartesian_topology_partition([1, 1, P_world.size])
    layer = gpudist.nn.DistributedConv1d(P, 1, 1, 3, padding=1)
    state = checkpoint.full_state_dict(layer)
    path = tmp_path / f"{P_world.plan_rank}.pt"
    writer = threading.Thread(target=torch.save, args=(state, path))
    writer.start()
    for i in range(20):
        layer(torch.full((1, 1, 4), float(i)))
    writer.join()
    assert torch.load(path).keys() == state.keys()
    _in_thread(lambda: checkpoint.save(layer, tmp_path / "saved"))
    checkpoint.load(layer, tmp_path / "saved")


@distributed(ranks=2)
def test_a_thread_that_prefetches_is_beside_operators(P_world: Partition) -> None:
    batches = [{"x": torch.full((3,), float(i))} for i in range(20)] if P_world.rank == 0 else None
    stream = gpudist.stream_batches(batches, P_world, prefetch=4)
    for i, batch in enumerate(stream):
        assert torch.equal(batch["x"], torch.full((3,), float(i)))
        assert P_world.allreduce_data([i]) == [i * P_world.size]
