"""One thread a rank, set before torch is imported anywhere; one pool for the whole run."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests import pool


def pytest_unconfigure(config: pytest.Config) -> None:
    pool.close_pool()
