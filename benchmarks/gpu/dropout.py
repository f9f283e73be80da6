"""Dropout whose cells depend on their global index, forward and backward, beside torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.case import Side
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.self_halo import name_of
from gpudist.nn import DistributedDropout
from gpudist.world.partition import Partition

P = 0.25
SHAPES = ((1, 32, 128, 128, 128), (8, 1024, 1024))
TINY = ((4, 64, 64),)
# Of the share of dropped cells.
TOLERANCE = 0.02


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are what a pass each way reads and writes."""
    return [
        GpuCase(
            "dropout", f"{name_of(shape)}, {clock}", ranks, 16 * torch.Size(shape).numel(),
            {"shape": shape}, clock=clock,
        )
        for shape in (TINY if tiny else SHAPES)
        for clock in ("device", "enqueue")
    ]  # fmt: skip


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    shape = case.parameters["shape"]
    P_x = P_world.create_cartesian_topology_partition([1] * len(shape))
    layer = DistributedDropout(P_x, P, seed=1).to(P_world.device)
    # Without zeros, so that dropped cells are told from others.
    x, gradient = (torch.rand(shape, device=P_world.device) + 1 for _ in range(2))

    @torch.enable_grad()
    def both_ways(drop: Callable[[torch.Tensor], torch.Tensor]) -> Sequence[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = drop(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, gradient)

    def is_right(found: Sequence[torch.Tensor]) -> bool:
        y, of_x = found
        kept = (y != 0) / (1 - P)
        share = float((y == 0).double().mean())
        return (
            abs(share - P) < TOLERANCE
            and torch.allclose(y, x * kept)
            and torch.allclose(of_x, gradient * kept)
        )

    return {
        "gpudist": Side(lambda: both_ways(layer), is_right),
        "torch": Side(lambda: both_ways(lambda x: F.dropout(x, P)), is_right),
    }
