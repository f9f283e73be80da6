"""Worlds on a GPU other than the first, over the doubles of CUDA and NCCL."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpudist import ops
from gpudist.errors import NotBuiltError, ShapeError, TransportError
from gpudist.exchange import carry
from gpudist.transport.base import Signature, Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.partition import CartesianPartition, Partition
from tests import warm
from tests.doubles import use_doubles
from tests.doubles.device import current_context, device, make, set_device
from tests.doubles.nccl import (
    clear,
    configure,
    contexts,
    count,
    fail_device_call,
    forget_contexts,
    violations,
)
from tests.doubles.ranks import run_all
from tests.transport.mortals import Mortals
from tests.transport.nccl_actions import (
    all_sum_reduce,
    backward,
    barrier,
    broadcast,
    halo,
    overlapped,
)
from tests.transport.worlds import collect, results

RANKS = 2
LONG_S = 20.0


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    """Not those that other files share: contexts are a process's."""
    ranks = Mortals(RANKS)
    yield ranks
    ranks.kill()


def on_second_gpu(transport: Transport) -> NcclTransport:
    """A world beside one over gloo; it is on GPU 1, and its tensors are on the CPU."""
    P_world = runtime.world_of(transport)
    served = None
    if transport.rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (port,) = P_world.broadcast_data([served.port] if served else None)
    store = served or dist.TCPStore("127.0.0.1", int(port), is_master=False)
    asked = runtime.settings()
    configure("devices", 2)
    assert set_device(1) == 0
    made = NcclTransport(
        store, transport.rank, transport.size, LONG_S, prefix="second",
        device=torch.device("cpu", 1), nccl_library=asked.nccl_library,
        device_library=asked.device_library,
    )  # fmt: skip
    made.device = torch.device("cpu")
    return made


def in_thread(call: Callable[[], Any]) -> None:
    """Call in a thread that has chosen no device."""
    run_all([call])


def act(P_world: Partition) -> None:
    for action in (halo, backward, overlapped, broadcast, all_sum_reduce, barrier):
        action(P_world)


def act_without_a_context(P_world: Partition) -> None:
    """Operators give a thread the context that they need, and take it back."""
    assert current_context() is None
    act(P_world)
    assert current_context() is None


def live_on_second_gpu(transport: Transport, fails: bool) -> tuple[dict[int, str], list[str]]:
    """The contexts of a world that does something in several threads, perhaps fails, and ends."""
    clear()
    configure("register_limit", 10**9)
    collect()  # with worlds that were on GPU 0
    forget_contexts()
    second = on_second_gpu(transport)
    P_second = runtime.world_of(second)
    act(P_second)
    in_thread(lambda: act_without_a_context(P_second))
    # The watchdog looks meanwhile.
    started = threading.Event()
    started.wait(0.2)
    in_thread(second.recorder.lines)
    if fails:
        failure = Failure("TransportError", transport.rank, "enough")
        in_thread(lambda: second.abort(failure))
        with pytest.raises(TransportError, match="enough"):
            halo(P_second)
    in_thread(second.close)
    started.wait(0.2)
    found = contexts(), violations()
    assert set_device(0) == 0
    clear()
    return found


@pytest.mark.parametrize("fails", [False, True], ids=["closed", "failed"])
def test_no_context_on_the_first_gpu(mortals: Mortals, fails: bool) -> None:
    """Each would take half a gigabyte there, beside the rank whose GPU it is."""
    ended = mortals.run(RANKS, live_on_second_gpu, fails, timeout_s=LONG_S, kind="gloo")
    for made, misuses in ended:
        assert list(made) == [1], made
        assert misuses == []


def break_device() -> None:
    memory, other = make("allocate", 64), make("allocate", 64)
    assert device().release(memory) == 0
    assert device().copy(other, memory, 64, None) == 0
    assert device().release(other) == 700


def end_on_a_broken_device(transport: Transport, is_closed: bool) -> str:
    """Every call of the device's fails for good, also those of what is being destroyed."""
    clear()
    second = on_second_gpu(transport)
    halo(runtime.world_of(second))
    if is_closed:
        second.close()
    break_device()

    def end() -> None:
        nonlocal second
        with suppress(TransportError):
            second.close()
        del second
        collect()

    in_thread(end)
    clear()
    assert set_device(0) == 0
    return "alive"


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_world_ends_on_a_broken_device(mortals: Mortals, is_closed: bool) -> None:
    ended = mortals.run(RANKS, end_on_a_broken_device, is_closed, timeout_s=LONG_S, kind="gloo")
    assert ended == ["alive"] * RANKS


class OnGpu:
    """A tensor, as far as a check of its device goes."""

    is_cpu, is_cuda = False, True

    def __init__(self, x: torch.Tensor, index: int) -> None:
        self._x = x
        self.device = torch.device("cuda", index)
        self.shape, self.dtype = x.shape, x.dtype

    def get_device(self) -> int:
        return self.device.index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._x, name)


def test_tensor_on_another_gpu() -> None:
    """It is refused before anything is made on either."""
    use_doubles()
    wire = runtime.connect("nccl", dist.HashStore(), 0, 1, LONG_S, "another gpu")
    P_x = runtime.world_of(wire).create_cartesian_topology_partition([1])
    x = torch.ones(4)
    movement = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    wire.device = torch.device("cuda", 1)
    run = wire.bind_steps(Signature("a test", bytes(16)), None, movement.steps).run
    blocks: list[Any] = [OnGpu(x, 0)]
    with pytest.raises(ShapeError, match="the tensor is on cuda:0, its partition is on cuda:1"):
        run(blocks)
    with pytest.raises(ShapeError, match="the tensor is on cpu, its partition is on cuda:1"):
        run([x])
    wire.device = torch.device("cpu")
    wire.close()


def without_code(transport: Transport) -> str:
    assert isinstance(transport, NcclTransport)
    clear()
    fail_device_call("check_kernels")
    with pytest.raises(NotBuiltError) as caught:
        runtime.connect(
            "nccl", transport.store, transport.rank, transport.size, LONG_S,
            f"{transport.prefix}/without",
        )  # fmt: skip
    clear()
    return str(caught.value)


def test_gpu_for_which_there_is_no_code() -> None:
    """Raise when the world is made, not at its first launch."""
    for text in results("nccl", RANKS, without_code):
        assert "capability 9.0" in text, text


PROGRAM = """
import torch, torch.distributed as dist, gpudist
dist.init_process_group("gloo")
group = dist.group.WORLD

class Backend:
    def _comm_ptr(self):
        return 1

torch.cuda.is_available = lambda: True
type(group)._get_backend = lambda self, device: Backend()
P_world = gpudist.init(process_group=group, timeout=20)
torch.cuda.is_available = lambda: False
assert P_world.transport == "nccl", P_world.transport
P_x = P_world.create_cartesian_topology_partition([2])
print(gpudist.all_sum_reduce(torch.ones(2), P_x, [0]).tolist())
"""


def test_communicator_of_a_process_group_stays_torchs() -> None:
    """A world ends its communicators when it fails; another's it may not."""
    use_doubles()
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "GPUDIST_TRANSPORT": "nccl", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--no-python", warm.python(), "-c", PROGRAM],
        capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("[2.0, 2.0]") == 2


def living() -> int:
    """Return how much memory of the device is left once threads have given theirs back."""
    found, since_s = -1, time.monotonic()
    while time.monotonic() - since_s < 0.3:
        if found != (found := count("allocate") - count("release")):
            since_s = time.monotonic()
        time.sleep(0.01)
    return found


def call_at_once(P_x: CartesianPartition, cells: int) -> None:
    """Four threads are the first to carry out one movement."""
    x = torch.arange(float(cells**3)).reshape(cells, cells, cells)
    movement = ops.HaloExchange(P_x, halo=((1, 1),) * 3, periodic=True).movement(x)
    barrier = threading.Barrier(4)

    def call() -> torch.Tensor:
        barrier.wait()
        return carry.carry_out([movement], [x])[0]

    found = run_all([call] * 4)
    (expected,) = carry.carry_out([movement], [x])
    assert all(torch.equal(y, expected) for y in found)


def test_threads_that_call_a_local_operator_first() -> None:
    """They get right numbers, and no table is made that nobody gives back."""
    use_doubles()
    collect()
    before, made = living(), count("allocate")
    wire = runtime.connect("nccl", dist.HashStore(), 0, 1, LONG_S, "local")
    P_x = runtime.world_of(wire).create_cartesian_topology_partition([1, 1, 1])
    for cells in range(4, 14):
        call_at_once(P_x, cells)
    assert count("allocate") > made, "no table is in the device's memory"
    wire.close()
    del wire, P_x
    collect()
    assert living() == before
