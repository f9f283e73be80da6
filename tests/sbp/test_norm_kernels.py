"""Batch norm of a global tensor by the kernels: output and running moments as torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import gpudist
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


class _Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(6, momentum=0.3)
        self.mean = torch.nn.BatchNorm2d(6, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean(self.norm(x))


@distributed(ranks=2, transports=["loopback", "nccl"])
def test_a_converted_network_updates_running_moments_within_the_norm(P_world: Partition) -> None:
    """The factor of the second norm differs at every call."""
    alone, x = _Norm(), (random((2, 6, 8, 5)) + 2).float()
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 1])
    network = gpudist.distribute(_Norm(), P_x, inputs={"x": "block"})
    assert P_world.rank is not None
    block = x.chunk(2, 2)[P_world.rank]
    for _ in range(10):
        expected, y = alone(x), network(block)
        torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-5)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(dict(network.named_buffers())[name], buffer)
