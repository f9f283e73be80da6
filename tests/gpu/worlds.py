"""The worlds for the tests of this folder, and the same world on CPUs for comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist

from gpudist.testing import run_distributed
from gpudist.testing.rank_pool import RankPool, RanksFailed
from gpudist.world import runtime
from tests.gpu.devices import ON_DOUBLES, SETTINGS, gpus, why_no_gpu_is_shared

Tensors = dict[str, torch.Tensor]

WAIT_S = 60.0
LIMIT_S = 120.0
ONE_RANK = "one rank"
A_RANK_A_GPU = "a rank a GPU"
SHARED = {"2 ranks on one GPU": 2, "4 ranks on one GPU": 4}
SEVERAL = (*SHARED, A_RANK_A_GPU)
# For tests that make a world of their own.
TWO_OR_MORE = ("2 ranks on one GPU", A_RANK_A_GPU)

_CHOSEN = {
    "GPUDIST_NCCL_LIBRARY": SETTINGS.nccl_library,
    "GPUDIST_DEVICE_LIBRARY": SETTINGS.device_library,
}
# Every rank's kernels must fit the GPU at once, and no module may be loaded while a peer's kernel
# waits there; nothing leaves the machine.
_SHARING = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUDA_MODULE_LOADING": "EAGER",
    "NCCL_CGA_CLUSTER_SIZE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}


class World(Protocol):
    """Ranks on GPUs."""

    size: int

    def run(self, body: Callable[..., Any], **params: Any) -> list[Any]:
        """Return the results of ``body(P_world, **params)`` on each rank.

        ``body`` is at module level.
        """
        ...


class OneRank:
    """A world of one, in this process."""

    size = 1

    def __init__(self) -> None:
        with environment(_CHOSEN):
            runtime.take_device("nccl", 0)
            self._wire = runtime.connect("nccl", dist.HashStore(), 0, 1, WAIT_S, "tests/gpu")

    def run(self, body: Callable[..., Any], **params: Any) -> list[Any]:
        self._wire.remembered.clear()
        torch.manual_seed(0)
        return [body(runtime.world_of(self._wire), **params)]

    def close(self) -> None:
        self._wire.close()


class SeveralRanks:
    """Processes of their own, on one GPU or on one each.

    They are spawned, so they inherit no CUDA state, and have their own environment. Over the
    doubles there is none, and they share the imports of one server.

    Args:
        kind: one of ``SEVERAL``.
        timeout_s: deadline of every wait between ranks.
        more: variables of their environment beside those that all worlds of this kind have.
    """

    def __init__(
        self, kind: str, timeout_s: float = WAIT_S, more: Mapping[str, str] | None = None
    ) -> None:
        self.size = SHARED.get(kind) or gpus()
        sharing = _sharing() if kind in SHARED else {}
        self._environment = {**_CHOSEN, **sharing, **(more or {})}
        how = "forkserver" if ON_DOUBLES else "spawn"
        self.pool = RankPool(self.size, timeout_s, start_method=how)

    def run(self, body: Callable[..., Any], **params: Any) -> list[Any]:
        try:
            return self.run_raising(body, **params)
        except RanksFailed as failed:
            report = str(failed)
        pytest.fail(report, pytrace=False)

    def run_raising(self, body: Callable[..., Any], **params: Any) -> list[Any]:
        """Raises ``RanksFailed``, for a test of what becomes of a rank's failure."""
        with environment(self._environment):
            return self.pool.run(self.size, body, kwargs=params, limit_s=LIMIT_S, transport="nccl")

    def processes(self) -> list[Any]:
        """Return the processes of the ranks, for a test of how they end."""
        return [worker.process for worker in self.pool._workers]

    def close(self) -> None:
        self.pool.close()


def why_there_is_no(kind: str) -> str:
    """Explain why a world cannot be made here; empty if it can."""
    if kind in SHARED:
        return why_no_gpu_is_shared()
    if kind == A_RANK_A_GPU and gpus() < 2:
        return f"a rank a GPU needs two GPUs or more, and there are {gpus()}"
    return ""


def assert_as_on_cpus(
    world: World,
    body: Callable[..., Tensors],
    tolerance: float = 0.0,
    reference: Mapping[str, Any] | None = None,
    **params: Any,
) -> None:
    """Check that ``body`` returns the same on each rank as on the CPU ranks of a loopback world.

    Args:
        world: the world to test.
        body: called with the partition of the world; returns tensors on the CPU.
        tolerance: relative and absolute tolerance; results must be bitwise equal if it is zero.
        reference: parameters that differ on the CPUs.
        params: the other parameters of ``body``.
    """
    actual = world.run(body, **params)
    expected = run_distributed(body, world.size, **{**params, **(reference or {})})
    for rank in range(world.size):
        assert actual[rank].keys() == expected[rank].keys()
        for name, mine in actual[rank].items():
            torch.testing.assert_close(
                mine, expected[rank][name], rtol=tolerance, atol=tolerance, equal_nan=True,
                msg=lambda text, where=f"{name} on rank {rank}": f"{where}: {text}",
            )  # fmt: skip


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set them, unset those that are empty, and restore all of them at the end."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set({name: value or "" for name, value in before.items()})


def _set(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def _sharing() -> dict[str, str]:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    kept = {name: os.environ.get(name, value) for name, value in _SHARING.items()}
    return {**kept, "CUDA_VISIBLE_DEVICES": first}
