"""Test doubles of CUDA's driver and NCCL; their results prove nothing about either."""

from __future__ import annotations

import functools
import os

import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.nccl import clear, violations


@functools.cache
def use_doubles() -> None:
    """Let processes started from here on run the nccl transport over the doubles, or skip."""
    try:
        path = str(library())
    except NoCompiler as error:
        pytest.skip(str(error))
    os.environ["GPUDIST_NCCL_LIBRARY"] = os.environ["GPUDIST_DEVICE_LIBRARY"] = path


def misuses_of_nccl() -> list[str]:
    """Return what the doubles have refused in this process since the last call, and clear it."""
    found = violations()
    clear()
    return found
