"""Devices of this machine for the tests of this folder, or the reason that they are missing."""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

from gpudist.world.environment import describe
from gpudist.world.runtime import build_info, settings
from tests.gpu import REHEARSED

# As this module is imported: other tests put the doubles into the environment later.
SETTINGS = settings()
ON_DOUBLES = SETTINGS.device_library != ""


@cache
def what_is_missing() -> str:
    """Explain why nothing here can run; empty if it can."""
    if ON_DOUBLES:
        return ""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return build_info().nccl_missing


def require_gpu() -> None:
    """Skip the calling test module, with the reason, if no GPU can be used."""
    if what_is_missing():
        pytest.skip(f"needs a GPU: {what_is_missing()}", allow_module_level=True)


def gpus() -> int:
    """Return the number of GPUs; over the doubles as many as a rehearsal is to pretend."""
    return int(os.environ.get(REHEARSED, "0")) if ON_DOUBLES else torch.cuda.device_count()


@cache
def why_no_gpu_is_shared() -> str:
    """Explain why NCCL would refuse several ranks on one GPU; empty if it would not."""
    if ON_DOUBLES:
        return ""
    found = describe(SETTINGS)
    if found.nccl is None:
        return f"NCCL is missing: {found.nccl_missing}"
    if "several ranks on one GPU" not in found.nccl.features:
        return f"NCCL {found.nccl.version} refuses several ranks on one GPU, which takes 2.30"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return "several ranks on one GPU need NCCL_MULTI_RANK_GPU_ENABLE=1"
    return ""


def scaled(on_gpus: int, rehearsed: int) -> int:
    """Return the size for GPUs, or the smaller one for rehearsals with the doubles."""
    return rehearsed if ON_DOUBLES else on_gpus
