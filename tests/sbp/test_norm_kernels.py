"""Batch norm of a global tensor by the kernels: output and running moments as torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.doubles.nccl import count
from tests.nn.norm.test_norm_kernels import skip_without_core
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.parts import B, S, random


@distributed(ranks=2, transports=["nccl"])
def test_running_moments(P_world: Partition) -> None:
    skip_without_core()
    placement = Placement("cpu", [0, 1], P_world)
    x = (random((2, 6, 8, 5)) + 2).float()
    moments, globals_ = (
        [(random((6,), seed).abs() + 1).float() for seed in (1, 2)] for _ in range(2)
    )
    y: Any = global_of(x, placement, (S(2),))
    running: list[Any] = [global_of(one, placement, (B,)) for one in globals_]
    before = count("launch_norm")
    found: Any = F.batch_norm(y, running[0], running[1], training=True, momentum=0.3)
    assert count("launch_norm") - before == 3
    expected = F.batch_norm(x, moments[0], moments[1], training=True, momentum=0.3)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(running, moments, strict=True):
        torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-5, atol=1e-5)
