"""Batch norm of a global tensor by the kernels: output and running moments as torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import gpudist
from gpudist.sbp import Placement
from gpudist.world.partition import Partition
from tests.doubles.nccl import count
from tests.nn.norm.norm_cases import NEEDS_CORE
from tests.nn.norm.test_norm_lines import LargeTensors
from tests.pool import distributed
from tests.sbp.compare import global_of
from tests.sbp.parts import B, S, random
from tests.sbp.test_autocast import OnGpus, autocast_of_gpus

pytestmark = NEEDS_CORE


@distributed(ranks=2, transports=["nccl"])
def test_running_moments(P_world: Partition) -> None:
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


@distributed(ranks=2, transports=["nccl"])
def test_autocast_of_gpus_converts_no_block(P_world: Partition) -> None:
    """It computes group and layer norm in float32, of 16-bit blocks that the kernels read."""
    placement = OnGpus("cpu", [0, 1], P_world)
    x = random((2, 6, 8, 5)).bfloat16()
    found: Any
    gradient: Any
    leaf: Any = global_of(x, placement, (S(2),)).requires_grad_()
    for norm in (lambda x: F.group_norm(x, 2), lambda x: F.layer_norm(x, [8, 5])):
        whole = x.float().requires_grad_()
        expected, found, gradient = norm(whole), None, None
        for _ in range(2):
            with autocast_of_gpus(torch.bfloat16), LargeTensors(x.numel() // 2) as large:
                found = norm(leaf)
                (gradient,) = torch.autograd.grad(found, leaf, found.detach())
        assert found.dtype == torch.float32 and gradient.dtype == torch.bfloat16
        assert large.made == 2
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-5)
        expected.backward(expected.detach())
        torch.testing.assert_close(gradient.full_tensor().float(), whole.grad, rtol=1e-2, atol=1e-2)


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
