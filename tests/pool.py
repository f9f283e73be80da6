"""Decorator that runs a test body on every rank: on threads, and on a pool of processes."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gpudist.testing import run_distributed
from gpudist.testing.rank_pool import RankPool, RanksFailed, StartMethod
from gpudist.transport import TRANSPORTS
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world.partition import Partition
from tests import warm
from tests.doubles import misuses_of_nccl, use_doubles

MAX_RANKS = 12
# Below a test's own limit, so that ranks that wait for each other report it themselves.
WAIT_S = 30.0
start_method: StartMethod = "forkserver"


@functools.cache
def the_pool() -> RankPool:
    """Return the one pool of the pytest run, started by the first test that needs it."""
    with suppress(pytest.skip.Exception):
        use_doubles()
    if start_method == "forkserver":
        warm.fork_ranks()
    return RankPool(MAX_RANKS, WAIT_S, start_method)


def close_pool() -> None:
    if the_pool.cache_info().currsize:
        the_pool().close()
        the_pool.cache_clear()


def distributed(
    ranks: int | Sequence[int],
    transports: Sequence[str] = tuple(reversed(TRANSPORTS)),
    timeout_s: float = 60.0,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a module-level body that runs on every rank of a world.

    The body's first parameter is ``P_world``; the others come from ``pytest.mark.parametrize`` or
    from fixtures, and are pickled. ``pytest.skip`` must be called on all ranks or none.

    Args:
        ranks: size of the world; of several, each is a test.
        transports: ``"loopback"``, threads of the pytest process; ``"gloo"``, ``"host"`` and
            ``"nccl"``, over the doubles of CUDA and NCCL, the pool's processes.
        timeout_s: limit of the test, after which it fails with every rank's stack.
    """
    sizes = [ranks] if isinstance(ranks, int) else list(ranks)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if "." in body.__qualname__:
            raise TypeError(f"{body.__qualname__} must be at top level: workers find it by name")
        in_worker = _Body(body.__module__, body.__name__)

        @functools.wraps(body)
        def test(*, ranks: int, transport: str, **params: Any) -> None:
            if transport != "gloo" and not is_built():
                pytest.skip(what_is_missing())
            if transport == "nccl":
                use_doubles()
            if transport == "loopback":
                reasons = _run_on_threads(in_worker, ranks, params, timeout_s)
            else:
                reasons = _run_on_processes(in_worker, ranks, params, timeout_s, transport)
            _skip_if_all_did(reasons)

        parameters = list(inspect.signature(body).parameters.values())[1:]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
        for name in ("ranks", "transport"):
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        vars(test).update(__signature__=inspect.Signature(parameters), body=body)
        test = pytest.mark.parametrize("ranks", sizes)(test)
        return pytest.mark.parametrize("transport", list(transports))(test)

    return decorate


@dataclass(frozen=True)
class _Body:
    """A test body by name, so that it can be sent; returns the reason if it was skipped.

    Fails where a misuse of NCCL or of the device went unnoticed otherwise.
    """

    module: str
    name: str

    def __call__(self, P_world: Partition, **params: Any) -> str | None:
        test = getattr(importlib.import_module(self.module), self.name)
        try:
            test.body(P_world, **params)
        except pytest.skip.Exception as skip:
            return str(skip.msg)
        finally:
            misuses = misuses_of_nccl() if P_world.transport == "nccl" else []
        assert not misuses, "NCCL or the device was misused:\n" + "\n".join(misuses)
        return None


def _run_on_threads(body: _Body, size: int, params: dict[str, Any], limit_s: float) -> list[Any]:
    torch.manual_seed(0)
    return run_distributed(body, size, transport="loopback", timeout=limit_s, **params)


def _run_on_processes(
    body: _Body, size: int, params: dict[str, Any], limit_s: float, transport: str
) -> list[Any]:
    try:
        return the_pool().run(size, body, kwargs=params, limit_s=limit_s, transport=transport)
    except RanksFailed as failed:
        report = str(failed)
    pytest.fail(report, pytrace=False)


def _skip_if_all_did(reasons: Sequence[str | None]) -> None:
    skipped = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if not skipped:
        return
    if len(skipped) < len(reasons):
        pytest.fail(f"skipped on ranks {sorted(skipped)} but not on all {len(reasons)}: {skipped}")
    pytest.skip(str(reasons[0]))
