"""One thread a rank, set before torch is imported anywhere; one pool for the whole run."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
# Whenever a store is connected to, torch asks a name server who 127.0.0.1 is. It may not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest

from tests import pool


def pytest_unconfigure(config: pytest.Config) -> None:
    pool.close_pool()
