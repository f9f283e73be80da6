"""One thread per rank, set before torch is imported anywhere; one pool for the whole run."""

# ruff: noqa: E402
from __future__ import annotations

import gc
import os
from typing import Any

# Imported modules and collected tests stay alive, so the garbage collector may skip them.
gc.disable()
os.environ["OMP_NUM_THREADS"] = "1"
# Whenever a store is connected to, torch asks a name server who 127.0.0.1 is, which may take
# its time, and warns when there is no answer. No test needs to know.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import pytest
import torch
from hypothesis import settings

from tests import pool

# The same examples in every run; others with `--hypothesis-profile=default --hypothesis-seed=N`.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


# Torch 2.11 built for CUDA, where there is no GPU: what fake tensors have in place of one is lost
# with the thread that had the first of them, and later ones end the process.
if torch.version.cuda and not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportAttributeAccessIssue]

# Files that begin first, since one that takes long and comes last has a processor to itself.
LONG = (
    "benchmarks/",
    "checkpoint/test_killed",
    "docs/",
    "examples/",
    "faults/",
    "ptx/",
)


# Transports after the first run one in this many cases of a body.
ONE_IN = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-transport",
        action="store_true",
        help="run every case of a test body on all of its transports",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
    if not config.getoption("--every-transport"):
        left_out = _left_to_other_transports(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _left_to_other_transports(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that only run with ``--every-transport``.

    The first transport of a body runs all of its cases; each of the others runs one in ``ONE_IN``,
    or fewer where there are fewer cases, so that every transport runs every body.
    """
    cases: dict[Any, dict[Any, list[pytest.Function]]] = {}
    for item in items:
        body = getattr(getattr(item, "function", None), "body", None)
        if body is not None and isinstance(item, pytest.Function):
            parameters = dict(item.callspec.params)
            transport = parameters.pop("transport")
            of_body = cases.setdefault(item.function, {})
            of_body.setdefault(transport, []).append(item)
    left_out: set[pytest.Item] = set()
    for of_body in cases.values():
        for number, of_transport in enumerate(of_body.values()):
            one_in = min(ONE_IN, len(of_transport)) if number else 1
            for i, item in enumerate(of_transport):
                if i % one_in != number % one_in:
                    left_out.add(item)
    return left_out


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the thousands of collected tests out of every later search for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    pool.close_pool()
