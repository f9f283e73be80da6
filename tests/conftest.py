"""One thread a rank, set before torch is imported anywhere; one pool for the whole run."""

from __future__ import annotations

import gc
import os

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
    "chaos/",
    "docs/",
    "examples/",
    "nodes/",
    "ptx/",
    "soak/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the thousands of collected tests out of every later search for garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    pool.close_pool()
