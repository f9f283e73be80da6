"""Errors of a rank that cannot join a world."""

from __future__ import annotations

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpudist.errors import CollectiveTimeout, NotBuiltError, PeerFailure, TransportError
from gpudist.transport.failure.store import StoreFailureChannel
from gpudist.transport.gloo import GlooTransport
from gpudist.transport.host import core_transport as core
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.transport.host.meeting import NotOneNode
from gpudist.transport.host.processes import has_ended
from gpudist.transport.host.transport import HostTransport
from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.nccl import transport as nccl
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.job_store import join_store
from gpudist.world.launch import Launch
from gpudist.world.runtime import take_device
from tests.doubles import use_doubles
from tests.transport.worlds import new_store

PREFIX = "world"
needs_core = pytest.mark.skipif(not is_built(), reason="" if is_built() else what_is_missing())


class LostStore(dist.Store):
    """One whose host ends when somebody has come."""

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("kind", ["gloo", pytest.param("host", marks=needs_core)])
def test_the_host_of_a_store_that_is_gone_is_named(kind: str) -> None:
    def join(store_rank: int | None) -> Any:
        if kind == "host":
            return HostTransport(LostStore(), 0, 2, 5.0, prefix=PREFIX, store_rank=store_rank)
        return GlooTransport(
            LostStore(), 0, 2, 5.0, prefix=PREFIX, same_node=True, store_rank=store_rank
        )

    for store_rank, words in ((1, "is gone: rank 1, its host, has ended"), (None, "its host has")):
        with pytest.raises(PeerFailure, match=words) as caught:
            join(store_rank)
        assert caught.value.rank == store_rank


def test_an_interface_that_is_not_there() -> None:
    store = new_store()
    store.set(f"{PREFIX}/arrived/1", "127.0.0.1")
    with pytest.raises(TransportError, match="GLOO_SOCKET_IFNAME is 'nowhere0'"):
        GlooTransport(store, 0, 2, 5.0, prefix=PREFIX, same_node=False, interface="nowhere0")
    failure = StoreFailureChannel(store, PREFIX).peek()
    assert failure is not None and "'nowhere0'" in failure.message


def test_an_address_that_others_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo: Any = dist.ProcessGroupGloo

    class Unreachable:
        _Options = gloo._Options
        create_device = staticmethod(gloo.create_device)

        def __init__(self, *_: object) -> None:
            raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", Unreachable)
    store = new_store()
    store.set(f"{PREFIX}/arrived/1", "127.0.0.1")
    words = "rank 0, at 127.0.0.1, is not connected with all others: Gloo connectFullMesh"
    with pytest.raises(TransportError, match=words):
        GlooTransport(store, 0, 2, 5.0, prefix=PREFIX, same_node=True)


def test_nobody_has_joined_before_all_have_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that closed at once would end connections that others are still making."""
    gloo: Any = dist.ProcessGroupGloo
    connected_s: list[float] = []

    class Slow:
        _Options = gloo._Options
        create_device = staticmethod(gloo.create_device)

        def __new__(cls, wire: Any, rank: int, size: int, options: Any) -> Any:
            made = gloo(wire, rank, size, options)
            time.sleep(0.4 * rank)
            connected_s.append(time.monotonic())
            return made

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", Slow)
    served: Any = new_store()
    # A connection each: who waits in one keeps it.
    stores = [served, served.clone(), served.clone()]

    def join(rank: int) -> float:
        mine = stores[rank]
        with closing(GlooTransport(mine, rank, 3, 10.0, prefix=PREFIX, same_node=True)):
            return time.monotonic()

    with ThreadPoolExecutor(3) as pool:
        joined_s = list(pool.map(join, range(3)))
    assert min(joined_s) >= max(connected_s) and len(connected_s) == 3


@needs_core
def test_ranks_of_nccl_that_never_come() -> None:
    use_doubles()
    library = os.environ["GPUDIST_NCCL_LIBRARY"]
    with pytest.raises(CollectiveTimeout, match=r"is still missing ranks \[1\] of 2"):
        NcclTransport(
            new_store(), 0, 2, 0.3, prefix=PREFIX, device=torch.device("cpu"),
            nccl_library=library, device_library=library,
        )  # fmt: skip


def test_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_native", None)
    monkeypatch.setattr(nccl, "_native", None)
    with pytest.raises(NotBuiltError, match="the host transport"):
        HostTransport(new_store(), 0, 2, 0.3, prefix=PREFIX)
    with pytest.raises(NotBuiltError, match=r"the loopback transport: .*pip install"):
        LoopbackTransport.single()
    with pytest.raises(NotBuiltError, match="the nccl transport"):
        NcclTransport(new_store(), 0, 2, 0.3, prefix=PREFIX, device=torch.device("cpu"))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUDIST_DEVICE_LIBRARY", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotBuiltError, match="the nccl transport: "):
        take_device("nccl", 0)
    take_device("gloo", 0)


def test_an_nccl_of_another_cuda_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GPUDIST_DEVICE_LIBRARY", raising=False)
    for name, answer in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(runtime, "what_nccl_misses", str)
    monkeypatch.setattr(runtime, "installed_wheels", lambda: {12: "2.27.5"})
    monkeypatch.setattr(torch.autograd, "set_multithreading_enabled", lambda _: None)
    take_device("nccl", 1)
    assert caplog.messages == []
    take_device("nccl", 0)
    assert "built for CUDA 13.0, but nvidia-nccl-cu12 2.27.5 is installed" in caplog.text


def test_nobody_serves_the_store() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        launch = Launch("torchrun", 1, 2, address="127.0.0.1", port=port)
        with pytest.raises(TransportError, match=f"rank 1 cannot meet .* at 127.0.0.1:{port}"):
            join_store(launch, 0.2)


@pytest.mark.parametrize("demanded", [True, False])
def test_containers_that_a_launcher_takes_for_one_node(
    monkeypatch: pytest.MonkeyPatch, demanded: bool
) -> None:
    """Ranks that do not see each other take gloo, unless the user demands host."""
    asked: list[tuple[str, str]] = []

    def connect(name: str, store: Any, rank: int, size: int, timeout: float, prefix: str, **_: Any):
        asked.append((name, prefix))
        if name == "host":
            raise NotOneNode("rank 0 does not see the processes of ranks [1]")
        return name

    monkeypatch.setattr(runtime, "connect", connect)
    if demanded:
        monkeypatch.setenv("GPUDIST_TRANSPORT", "host")
    else:
        monkeypatch.delenv("GPUDIST_TRANSPORT", raising=False)
    launch = Launch("torchrun", 0, 2, 2, 0)

    def join() -> Any:
        return runtime._connect_all("host", dist.HashStore(), launch, 5.0, None, False)

    if demanded:
        with pytest.raises(NotOneNode, match="does not see"):
            join()
        assert [name for name, _ in asked] == ["host"]
    else:
        assert join() == "gloo"
        (_, first), (_, second) = asked
        assert first != second


def test_who_cannot_say_whether_a_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    assert not has_ended(os.getpid())
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        has_ended(os.getpid())
