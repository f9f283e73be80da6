"""Norms over a split dim, forward and backward, beside torch's function on the same block.

The layers run as on several ranks, but a sum over ranks has one summand, so that no message is
sent: what they cost is their kernels, and the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import Side
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from gpudist import nn
from gpudist.exchange import Movement, bind
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.nn.norm import normalization
from gpudist.world.partition import CartesianPartition, Partition

GROUPS = 4
SHAPES = ((1, 32, 128, 128, 128), (1, 32, 64, 64, 64), (1, 128, 16, 16, 16))
TINY = ((2, 8, 4, 4, 4),)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
# Relative, in Euclidean norm, of results in float64.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}

Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TORCHS: dict[str, Norm] = {
    "group": lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias),
    "batch": lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, True),
    "instance": lambda x, weight, bias: F.instance_norm(x, None, None, weight, bias),
}
OURS: dict[str, Callable[[CartesianPartition, int], torch.nn.Module]] = {
    "group": lambda P_x, channels: nn.DistributedGroupNorm(P_x, GROUPS, channels),
    "batch": lambda P_x, channels: nn.DistributedBatchNorm(
        P_x, channels, track_running_stats=False
    ),
    "instance": lambda P_x, channels: nn.DistributedInstanceNorm3d(P_x, channels, affine=True),
}


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are what two passes over the block each way read and write."""
    found: list[GpuCase] = []
    for shape in TINY if tiny else SHAPES:
        for kind in OURS:
            for dtype in DTYPES:
                for layout in LAYOUTS:
                    for clock in ("device", "enqueue"):
                        if clock == "enqueue" and (shape not in (SHAPES[-1], *TINY)):
                            continue
                        parameters = {
                            "shape": shape, "kind": kind, "dtype": dtype, "layout": layout
                        }  # fmt: skip
                        name = f"{kind} [{','.join(map(str, shape))}], {dtype}, {layout}, {clock}"
                        cells = torch.Size(shape).numel()
                        # Forward reads twice and writes; backward reads both twice and writes.
                        nbytes = 8 * cells * DTYPES[dtype].itemsize
                        found.append(GpuCase("norms", name, ranks, nbytes, parameters, clock=clock))
    return found


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    shape, kind, name = (case.parameters[key] for key in ("shape", "kind", "dtype"))
    dtype, layout = DTYPES[name], LAYOUTS[case.parameters["layout"]]
    P_x = P_world.create_cartesian_topology_partition([1] * len(shape))
    generator = torch.Generator(P_world.device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    x = drawn(*shape).contiguous(memory_format=layout)
    gradient = drawn(*shape).contiguous(memory_format=layout)
    layer = OURS[kind](P_x, shape[1]).to(P_world.device, dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(drawn(shape[1]))
    weight, bias = layer.parameters()
    with as_if_split():
        layer(x)
    expected = both_ways(
        lambda x: TORCHS[kind](x, *wide), x.double(),
        wide := [p.detach().double().requires_grad_() for p in (weight, bias)], gradient.double(),
    )  # fmt: skip
    tolerance = TOLERANCES[name]

    def is_right(found: Sequence[torch.Tensor]) -> bool:
        return all(
            bool((a.double() - b).norm() <= tolerance * b.norm())
            for a, b in zip(found, expected, strict=True)
        )

    def side(norm: Callable[[torch.Tensor], torch.Tensor]) -> Side:
        return Side(lambda: both_ways(norm, x, (weight, bias), gradient), is_right)

    return {
        "gpudist": side(layer),
        "torch": side(lambda x: TORCHS[kind](x, weight, bias)),
    }


@torch.enable_grad()
def both_ways(
    norm: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the output and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    y = norm(x)
    return y.detach(), *torch.autograd.grad(y, [x, *parameters], gradient)


@contextmanager
def as_if_split() -> Iterator[None]:
    """Let norms that see their first block meanwhile sum over ranks, even over a single one.

    Raises:
        RuntimeError: no norm bound a sum, so that none would be measured as if it were split.
    """
    bound: list[Movement] = []

    def bind_alone(
        P: CartesianPartition, axes: Sequence[int], key: Any, shape: Sequence[int]
    ) -> Movement:
        plan = plan_all_sum_reduce(0, [0], tuple(shape), ("moments of one", key))
        bound.append(bind(plan, P, "moments", torch.float64, tuple(shape), torch.float64))
        return bound[-1]

    original, normalization.bind_total = normalization.bind_total, bind_alone
    try:
        yield
    finally:
        normalization.bind_total = original
    if not bound:
        raise RuntimeError("no norm has bound a sum over ranks")
