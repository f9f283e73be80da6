"""The adjoint of a periodic halo exchange, compared with its forward.

Target: at most 1.15 times the forward. Both move the same cells; the adjoint adds the contributions
to each cell in a fixed order.
"""

from __future__ import annotations

import torch

from benchmarks.case import Side
from benchmarks.gpu.kernel import equal_to, random
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.self_halo import exchange_of, moved_bytes, name_of, padded
from gpudist.exchange import carry_out
from gpudist.world.partition import Partition

SHAPES = ((1, 1, 32, 32, 32), (1, 4, 256, 256, 256), (1, 16, 4096, 4096))
TINY = ((1, 2, 6, 5, 4), (1, 2, 5, 6))


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are the padded block and the block."""
    return [
        GpuCase("adjoint", name_of(shape), ranks, moved_bytes(shape), {"shape": shape})
        for shape in (TINY if tiny else SHAPES)
    ]


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    """Return the sides; torch's side is the backward of its circular padding."""
    x = random(case.parameters["shape"], torch.float32, P_world.device)
    movement = exchange_of(case.parameters["shape"], P_world).movement(x)
    y = padded(x)
    gradient = random(tuple(y.shape), torch.float32, P_world.device)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        padded_leaf = padded(leaf)

    def backward() -> torch.Tensor:
        return torch.autograd.grad(padded_leaf, leaf, gradient, retain_graph=True)[0]

    is_right = equal_to(backward())
    return {
        "gpudist": Side(lambda: carry_out((movement.T,), (gradient,))[0], is_right),
        "forward": Side(lambda: carry_out((movement,), (x,))[0], equal_to(y)),
        "torch pad backward": Side(backward, is_right),
    }
