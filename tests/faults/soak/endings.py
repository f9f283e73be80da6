"""Programs that end in odd states. Each is called with its rank, on every rank of a world."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import torch

import gpudist
from gpudist import nn
from gpudist.errors import GpudistError
from gpudist.exchange import start
from gpudist.ops import HaloExchange
from gpudist.world.partition import CartesianPartition, Partition

DEADLINE_S = 20.0
kept: list[Any] = []


def world() -> tuple[Partition, CartesianPartition]:
    torch.set_num_threads(1)
    P_world = gpudist.init(timeout=DEADLINE_S)
    return P_world, P_world.create_cartesian_topology_partition([P_world.size])


def halo(P_x: CartesianPartition, n: int = 6) -> torch.Tensor:
    """One exchange, checked."""
    rank = P_x.rank or 0
    cells = torch.arange(float(n * P_x.size)).roll(1)
    x = torch.arange(float(n)) + n * rank
    y = gpudist.halo_exchange(x, P_x, halo=[(1, 0)], periodic=True, global_shape=[n * P_x.size])
    assert torch.equal(y, torch.cat([cells[n * rank : n * rank + 1], x])), y
    return y


def just_returns(rank: int) -> None:
    _, P_x = world()
    halo(P_x)


def leaves_everything_alive(rank: int) -> None:
    """Keep layers, an unused graph and reference cycles alive until the interpreter ends."""
    P_world, P_x = world()
    P_3 = P_world.create_cartesian_topology_partition([1, 1, P_world.size])
    layer = nn.DistributedConv1d(P_3, 2, 2, 3, padding=1)
    x = torch.randn(1, 2, 5, requires_grad=True)
    kept.extend([P_world, P_x, layer, layer(x), HaloExchange(P_x, halo=[(1, 1)])])
    kept.append(kept)
    gc.disable()


def leaves_an_exchange_in_flight(rank: int) -> None:
    _, P_x = world()
    exchange = HaloExchange(P_x, halo=[(1, 1)], global_shape=[8 * P_x.size])
    x = torch.ones(8)
    kept.append(start([exchange.movement(x)], [x]))


def operates_after_everything_is_closed(rank: int) -> None:
    """Handlers of exit run in reverse: this one after gpudist's own, which has left the world."""

    def late() -> None:
        try:
            halo(kept[0])
        except GpudistError as error:
            print(f"refused: {type(error).__name__}: {error}")

    atexit.register(late)
    _, P_x = world()
    kept.append(P_x)
    halo(P_x)


class _Operates:
    """Something of the user's that moves data when it is collected."""

    def __init__(self, P_x: CartesianPartition) -> None:
        self.P_x = P_x

    def __del__(self) -> None:
        try:
            halo(self.P_x)
        except Exception:
            # The error depends on how much of Python still exists.
            os.write(1, b"refused")


def operates_while_the_interpreter_is_taken_down(rank: int) -> None:
    _, P_x = world()
    halo(P_x)
    sys.modules["a module of the user's"] = _Operates(P_x)  # type: ignore[assignment]


def raises(rank: int) -> None:
    _, P_x = world()
    halo(P_x)
    if rank == 1:
        raise ValueError("of the user's")
    time.sleep(0.2)
    halo(P_x)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward, of the user's")


def raises_in_backward(rank: int) -> None:
    """Raise on one rank in backward, between the adjoints of two exchanges."""
    _, P_x = world()
    exchange = HaloExchange(P_x, halo=[(1, 0)], periodic=True, global_shape=[7 * P_x.size])
    x = torch.ones(7, requires_grad=True)
    y = exchange(x)[1:]
    y = _Raises.apply(y) if rank == 1 else y.clone()
    exchange(y).sum().backward()


def goes_on_after_an_error_in_backward(rank: int) -> None:
    """The same on all ranks, where it ends no world: all of them know."""
    _, P_x = world()
    exchange = HaloExchange(P_x, halo=[(1, 0)], periodic=True, global_shape=[7 * P_x.size])
    x = torch.ones(7, requires_grad=True)
    for _ in range(3):
        try:
            exchange(_Raises.apply(exchange(x)[1:])).sum().backward()
        except ValueError as error:
            print(f"caught: {error}")
        halo(P_x)
    exchange(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 6 + [2.0]


def is_interrupted(rank: int) -> None:
    """While it waits, in native code, for a rank that does not come; the other learns of it."""
    _, P_x = world()
    halo(P_x)
    if rank == 1:
        time.sleep(1.0)
        halo(P_x)
        return
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin_s = time.monotonic()
    try:
        halo(P_x)
    except KeyboardInterrupt:
        print(f"interrupted after {time.monotonic() - begin_s:.2f} s")
        raise


def forks(rank: int) -> None:
    """Children that end in every way leave the parent's world as it is."""
    _, P_x = world()
    halo(P_x)
    for leave in (os._exit, sys.exit):
        pid = os.fork()
        if pid == 0:
            leave(0)
        assert os.waitpid(pid, 0)[1] == 0
        halo(P_x)
    pid = os.fork()
    if pid == 0:
        return  # through the whole exit of the interpreter
    assert os.waitpid(pid, 0)[1] == 0
    halo(P_x)
    print("went on")


def operates_in_a_forked_child(rank: int) -> None:
    _, P_x = world()
    halo(P_x)
    pid = os.fork()
    if pid == 0:
        try:
            halo(P_x)
        except GpudistError as error:
            print(f"refused: {type(error).__name__}: {error}", flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    halo(P_x)


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((2,), float(i))


def loads_data_in_forked_workers(rank: int) -> None:
    _, P_x = world()
    halo(P_x)
    loader = torch.utils.data.DataLoader(_Numbers(), batch_size=3, num_workers=2)
    for batch in loader:
        gpudist.all_sum_reduce(batch.flatten(), P_x, [0], global_shape=[6])
    halo(P_x)


def leaves_a_thread_waiting(rank: int) -> None:
    """Wait in native code for a message that does not come, while the interpreter exits."""
    _, P_x = world()
    halo(P_x)

    def wait() -> None:
        # That this rank has left, or nothing any more.
        with suppress(GpudistError):
            halo(P_x)

    if rank == 0:
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.3)
    else:
        time.sleep(0.8)


def operates_in_threads(rank: int) -> None:
    """One thread after the other, and each with a backward of its own."""
    _, P_x = world()
    exchange = HaloExchange(P_x, halo=[(1, 0)], periodic=True, global_shape=[7 * P_x.size])
    turn = threading.Lock()
    done: list[int] = []

    def work(number: int) -> None:
        # Ranks call in one order: that of the numbers.
        while len(done) != number:
            time.sleep(0.001)
        with turn:
            x = torch.ones(7, requires_grad=True)
            exchange(x).sum().backward()
            assert x.grad is not None and x.grad.sum() == 8
            done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in reversed(range(6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == list(range(6))


def collects_in_odd_orders(rank: int) -> None:
    """Objects that belong together die in every order, and the remaining ones work on."""
    P_world, P_x = world()
    for order in range(6):
        P_line = P_world.create_cartesian_topology_partition([P_world.size])
        exchange = HaloExchange(P_line, halo=[(1, 0)], periodic=True)
        x = torch.ones(5, requires_grad=True)
        y = exchange(x)
        things: dict[str, Any] = {"partition": P_line, "operator": exchange, "input": x}
        things["itself"] = things
        died = weakref.ref(exchange)
        del P_line, exchange, x
        for name in sorted(things, key=lambda name: hash((name, order)) % 7):
            things.pop(name)
            gc.collect()
        del things
        gc.collect()
        y.sum().backward()
        del y
        gc.collect()
        assert died() is None
        halo(P_x)


def leaves_early(rank: int) -> None:
    _, P_x = world()
    halo(P_x)
    if rank == 1:
        sys.exit(0)
    halo(P_x)


def closes_and_goes_on(rank: int) -> None:
    """Closed by hand, twice: refused from then on, and the exit has nothing left to do."""
    P_world, P_x = world()
    halo(P_x)
    P_world.barrier()
    P_world.wire.close()
    P_world.wire.close()
    try:
        halo(P_x)
    except GpudistError as error:
        print(f"refused: {type(error).__name__}: {error}")
