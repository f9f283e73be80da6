"""Ranks that are threads: they take turns, and nothing that they do can hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import gpudist
from gpudist.errors import (
    CollectiveTimeout,
    GpudistError,
    PlanMismatch,
    ShapeError,
    TransportError,
)
from gpudist.exchange import InFlight, start
from gpudist.testing import run_distributed
from gpudist.transport.base import Signature, Transport
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.transport.loopback import LoopbackTransport, LoopbackWorld
from gpudist.world.partition import Partition
from tests.patience import allowed_s
from tests.pool import distributed
from tests.transport.test_failures import errors_of, raise_on_two, ring
from tests.transport.worlds import outcomes

pytestmark = pytest.mark.skipif(not is_built(), reason=what_is_missing())


def wait_for_next(transport: Transport) -> None:
    everyone = transport.communicator(range(transport.size))
    if transport.rank < 2:
        everyone.recv(torch.zeros(2), transport.rank + 1)


def test_loopback_finds_a_deadlock_at_once() -> None:
    start_s = time.monotonic()
    ended = outcomes("loopback", 3, wait_for_next, timeout_s=300)
    assert time.monotonic() - start_s < allowed_s(2)
    assert ended.pop(2).error is None
    for text in errors_of(ended, CollectiveTimeout):
        assert "deadlock" in text
        assert "rank 0 waits for rank 1 to send message 0 of 8 bytes" in text
        assert "rank 1 waits for rank 2 to send" in text
        assert "rank 2 has finished" in text


def cross(transport: Transport) -> None:
    """Each sends to the other and means something else: no message is ever opened."""
    everyone = transport.communicator(range(2))
    name = "a sum" if transport.rank else "a broadcast"
    with transport.group(Signature(name, name.encode().ljust(16))):
        everyone.send(torch.zeros(2), 1 - transport.rank)


def test_loopback_tells_a_disagreement_from_a_deadlock() -> None:
    start_s = time.monotonic()
    for text in errors_of(outcomes("loopback", 2, cross, timeout_s=300), PlanMismatch):
        assert "ranks disagree about what they do" in text
        assert "rank 1 to receive message 0 of 8 bytes for 'a broadcast'" in text
        assert "rank 0 to receive message 0 of 8 bytes for 'a sum'" in text
    assert time.monotonic() - start_s < allowed_s(2)


def test_loopback_raises_the_cause_and_not_its_echo() -> None:
    with pytest.raises(ZeroDivisionError, match="a mistake of the user") as caught:
        LoopbackWorld(4).run(raise_on_two)
    note = "raised on rank 2 of a loopback world of 4"
    assert note in getattr(caught.value, "__notes__", [str(caught.value)])[-1]


def draw(transport: LoopbackTransport) -> list[float]:
    drawn = [torch.rand(()).item()]
    ring(transport, "hand over")
    return [*drawn, torch.rand(()).item()]


def test_loopback_ranks_have_generators_of_their_own() -> None:
    torch.manual_seed(7)
    expected = torch.rand(2).tolist()
    torch.manual_seed(7)
    assert LoopbackWorld(3).run(draw) == [expected] * 3
    assert torch.rand(2).tolist() == expected


def be_late(transport: LoopbackTransport) -> None:
    pair, x = transport.communicator([0, 1]), torch.zeros(1)
    if transport.rank == 1:
        time.sleep(0.3)
    with transport.group(Signature("a message", bytes(16))):
        pair.recv(x, 1 - transport.rank)


def test_loopback_waits_no_longer_than_its_deadline() -> None:
    """Another rank has run all the while, so that nobody could see a deadlock before."""
    with pytest.raises(CollectiveTimeout, match=r"on rank 0 was not complete after 0\.1 s"):
        LoopbackWorld(2, timeout_s=0.1).run(be_late)


def tangent_of_a_ring(P: Partition) -> torch.Tensor:
    P_x, ones = P.grid(P.size), torch.ones(2)
    return torch.func.jvp(lambda x: gpudist.halo_exchange(x, P_x, halo=[(1, 1)]), (ones,), (ones,))[
        1
    ]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_threads_do_not_wait_within_forward_mode() -> None:
    with pytest.raises(TransportError, match=r"rank 0 would wait .* transport='host'"):
        run_distributed(tangent_of_a_ring, 2)
    assert run_distributed(tangent_of_a_ring, 1)[0].sum() == 2


def test_a_deadline_does_not_interrupt_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import time; end = time.time() + 2\nwhile time.time() < end: time.sleep(0.01)\n"
    (tmp_path / "slow_module.py").write_text(
        f"with open(__file__ + '.log', 'a') as f: f.write('x')\n{code}"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def body(wire: Transport) -> str:
        return import_module("slow_module").__name__

    with pytest.raises(CollectiveTimeout):
        LoopbackWorld(1).run(body, 0.1)
    assert LoopbackWorld(2).run(body) == ["slow_module"] * 2
    assert (tmp_path / "slow_module.py.log").read_text() == "x"


def test_a_world_of_nobody() -> None:
    with pytest.raises(TransportError, match="at least one rank, not 0"):
        LoopbackWorld(0)


def test_loopback_of_one_needs_no_thread() -> None:
    before = threading.active_count()
    transport = LoopbackTransport.single()
    output = torch.zeros(3)
    alone = transport.communicator([0])
    alone.all_reduce(torch.arange(3.0), output)
    assert output.tolist() == [0, 1, 2]
    with pytest.raises(TransportError, match="the max of no contributions is undefined"):
        alone.reduce(None, output, 0, "max")
    with pytest.raises(ShapeError, match=r"carries tensors on cpu, not .* on meta"):
        alone.broadcast(torch.zeros(1, device="meta"), 0)
    assert threading.active_count() == before


def wait_for_ever(transport: LoopbackTransport) -> None:
    while True:
        ring(transport, "again")


@pytest.fixture
def control_c() -> Iterator[None]:
    """Control-C raises, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("control_c")
def test_loopback_ends_with_control_c() -> None:
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        LoopbackWorld(2).run(wait_for_ever)
    assert time.monotonic() - start_s < allowed_s(3)
    assert not [t for t in threading.enumerate() if t.name.startswith("gpudist loopback")]


def wait_in_a_circle(transport: Transport) -> None:
    everyone = transport.communicator(range(transport.size))
    everyone.recv(torch.zeros(2), (transport.rank + 1) % transport.size)


def test_a_deadlock_names_what_each_of_many_ranks_waits_for() -> None:
    start_s = time.monotonic()
    ended = outcomes("loopback", 64, wait_in_a_circle, timeout_s=300)
    assert time.monotonic() - start_s < allowed_s(3)
    texts = errors_of(ended, CollectiveTimeout)
    assert len(set(texts)) == 1
    for rank in range(64):
        assert f"rank {rank} waits for rank {(rank + 1) % 64} to send message 0 of 8" in texts[0]


def everyone_to_everyone(P_world: Partition) -> int:
    """The descriptors in use after each rank has sent to each other."""
    found = P_world.allgather_data([P_world.plan_rank])
    assert found == [[rank] for rank in range(P_world.size)]
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    x = torch.arange(float(P_world.size)) + P_world.plan_rank
    gathered = gpudist.sum_scatter(x, P_x, axes=[0])
    n = P_world.size
    assert gathered.tolist() == [n * P_world.plan_rank + n * (n - 1) / 2]
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [17, 64])
def test_many_ranks_need_no_descriptors(size: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert max(run_distributed(everyone_to_everyone, size)) <= before + 2


def leave_early(transport: Transport) -> int:
    """Rank 1 ends; rank 0 waits for it, and the others have work to do meanwhile."""
    if transport.rank == 0:
        transport.communicator(range(4)).recv(torch.zeros(2), 1)
    for _ in range(20 * (transport.rank > 1)):
        transport.communicator([2, 3]).all_reduce(torch.ones(2), torch.empty(2))
    return transport.rank


def test_a_thread_that_ends_while_a_peer_waits() -> None:
    ended = outcomes("loopback", 4, leave_early, timeout_s=300)
    assert [outcome.value for outcome in ended[1:]] == [1, 2, 3]
    (text,) = errors_of(ended[:1], CollectiveTimeout)
    assert "rank 0 waits for rank 1 to send" in text and "rank 1 has finished" in text


@distributed(ranks=[2, 3], transports=["loopback"])
def test_large_messages(P_world: Partition) -> None:
    """In long rows and in short ones, copied and added, as dense torch has them."""
    n, rank = P_world.size, P_world.plan_rank
    whole = torch.randn(n * 300, n * 700, generator=torch.Generator().manual_seed(1)).double()
    for grid in ([n, 1], [1, n]):
        P_x = P_world.create_cartesian_topology_partition(grid)
        dim = grid.index(n)
        part = whole.tensor_split(n, dim)[rank].clone().requires_grad_()
        extent = part.shape[dim]
        widths = [(0, 0), (0, 0)]
        widths[dim] = (extent, extent)
        y = gpudist.halo_exchange(part, P_x, halo=widths, padding_value=2.0)
        padding = [0, 0, extent, extent] if dim == 0 else [extent, extent]
        padded = torch.nn.functional.pad(whole, padding, value=2.0)
        assert torch.equal(y, padded.narrow(dim, rank * extent, 3 * extent))
        y.backward(torch.full_like(y, 0.5))
        neighbours = (rank > 0) + (rank < n - 1)
        assert part.grad is not None and part.grad.unique().tolist() == [0.5 * (1 + neighbours)]
    P_all = P_world.create_cartesian_topology_partition([n])
    blocks = [whole.roll(other) for other in range(n)]
    total = gpudist.all_sum_reduce(blocks[rank], P_all, axes_reduce=[0])
    expected = blocks[0]
    for block in blocks[1:]:
        expected = expected + block
    assert torch.equal(total, expected)


@distributed(ranks=[2, 3], transports=["loopback"])
def test_sums_without_cells(P_world: Partition) -> None:
    """Nothing is sent, and what is complete at once is not waited for."""
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    for _ in range(2):
        x = torch.empty(3, 0, requires_grad=True)
        y = gpudist.all_sum_reduce(x, P_x, axes_reduce=[0])
        y.sum().backward()
        assert y.shape == (3, 0) and x.grad is not None and x.grad.shape == (3, 0)


def test_one_world_inside_another_and_beside_it() -> None:
    def inner(P_inner: Partition, value: int) -> list[int]:
        return P_inner.allreduce_data([value + P_inner.plan_rank])

    def outer(P_world: Partition) -> list[int]:
        sums = run_distributed(inner, 3, 10 * P_world.plan_rank)
        assert sums == [[30 * P_world.plan_rank + 3]] * 3
        return P_world.allreduce_data(sums[0])

    found: list[object] = []
    beside = threading.Thread(target=lambda: found.append(run_distributed(outer, 2)))
    beside.start()
    found.append(run_distributed(outer, 2))
    beside.join()
    assert found == [[[36], [36]]] * 2


def test_what_another_thread_drops_unfinished_does_not_hang() -> None:
    """The garbage collector may, in the thread of any rank, while the owner waits."""
    held: list[InFlight] = []

    def body(P_world: Partition) -> None:
        P_x = P_world.create_cartesian_topology_partition([2])
        x = torch.ones(8)
        operator = gpudist.ops.HaloExchange(P_x, halo=((1, 1),))
        operator(x)
        if P_world.rank == 0:
            # The other rank runs first.
            assert held
            held.clear()
        else:
            held.append(start([operator.movement(x)], [x]))
        with pytest.raises(GpudistError, match="did not wait for it"):
            P_world.barrier()

    start_s = time.monotonic()
    run_distributed(body, 2)
    assert time.monotonic() - start_s < allowed_s(3)


def test_a_fork_of_a_rank_leaves_its_world_alone() -> None:
    def body(P_world: Partition) -> tuple[int, list[int]]:
        P_world.barrier()
        child = os.fork() if P_world.rank == 0 else 0
        if P_world.rank == 0 and child == 0:
            try:
                P_world.barrier()
            except TransportError as error:
                os._exit(7 * ("was forked from rank 0" in str(error)))
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 7
        return code, P_world.allreduce_data([1])

    assert run_distributed(body, 2) == [(7, [2])] * 2
