"""One thread per rank, set before torch is imported anywhere; one pool for the whole run."""

# ruff: noqa: E402
from __future__ import annotations

import gc
import importlib
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

# Imported modules and collected tests stay alive, so the garbage collector may skip them.
gc.disable()
os.environ["OMP_NUM_THREADS"] = "1"
# Whenever a store is connected to, torch asks a name server who 127.0.0.1 is, which may take
# its time, and warns when there is no answer. No test needs to know.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Else each process that compiles starts another one, which imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests import garbage as garbage, pool, warm
from tests.every import EVERY

# The same examples in every run; others with `--hypothesis-profile=default --hypothesis-seed=N`.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


# Torch 2.11 built for CUDA, where there is no GPU: what fake tensors have in place of one is lost
# with the thread that had the first of them, and later ones end the process.
if torch.version.cuda and not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportAttributeAccessIssue]

HERE = Path(__file__).resolve().parent

# Files that begin first, since one that takes long and comes last has a processor to itself.
LONG = (
    "benchmarks/",
    "checkpoint/test_killed",
    "docs/",
    "examples/",
    "faults/",
    "hazards/",
    "nn/test_co",
    "ptx/",
    "sbp/test_cuts",
    "zoo/",
)


# Rooms whose tests run on every transport, and files whose tests do so over gloo too.
ON_EVERY_TRANSPORT = ("exchange/", "faults/", "transport/")
OVER_GLOO = ("test_determinism", "transport/test_conformance", "transport/test_failures")


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of ranks and programs before all others, if the whole suite is to run."""
    if _is_whole(config):
        warm.fork_ranks()


def _is_whole(config: pytest.Config) -> bool:
    return [Path(each).resolve() for each in config.args] == [HERE]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each worker of pytest-xdist compile other files first, and find the rest compiled."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or not _is_whole(session.config):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(HERE.rglob("test_*.py"))[number::count]:
        # A file that skips or fails does so again when it is collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _room(item).startswith(LONG))
    if not EVERY:
        chosen = _chosen(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def _chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that run without ``EVERY=1``.

    Where a test runs over host, its cases over gloo are left out, except in ``OVER_GLOO``. Two
    cases of a ``distributed`` test run, spread over all of them, each on one transport. Transports
    take turns, from another one in each test of a file; in the rooms that depend on them, four
    cases run, or a single one on all. Other tests run every case. A test marked with ``one_in(n)``
    runs one in ``n`` of all these.
    """
    tests: dict[Any, dict[str, list[pytest.Item]]] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        # Those of a class, which inherits it, are another's cases.
        test = (item.parent, item.function)
        transport = str(parameters.get("transport", ""))
        tests.setdefault(test, {}).setdefault(transport, []).append(item)
    chosen: set[pytest.Item] = set()
    numbers: Counter[Any] = Counter()
    for (file, _), transports in tests.items():
        if "host" in transports and not _room(transports["host"][0]).startswith(OVER_GLOO):
            transports.pop("gloo", None)
        chosen.update(_in_turn(list(transports.values()), numbers[file]))
        numbers[file] += 1
    return chosen


def _in_turn(transports: list[list[pytest.Item]], number: int) -> list[pytest.Item]:
    found = [item for items in transports for item in items]
    assert isinstance(found[0], pytest.Function)
    if hasattr(found[0].function, "body"):
        found = transports[0]
        on_all = _room(found[0]).startswith(ON_EVERY_TRANSPORT)
        count = min(4, len(found) * len(transports)) if on_all else min(2, len(found))
        found = [
            transports[(i + number) % len(transports)][i * len(found) // count]
            for i in range(count)
        ]
    marker = found[0].get_closest_marker("one_in")
    each = 1 if marker is None else marker.args[0]
    return [item for i, item in enumerate(found) if _shifted(i, each) == 0]


def _room(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/")


def _shifted(i: int, count: int) -> int:
    # Shifted by one in each round, so that no parameter keeps step with the transports.
    return (i + i // count) % count


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the thousands of collected tests out of every later search for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    pool.close_pool()
    warm.close()
