"""The option ``nested`` of every layer with a halo exchange, counted and priced without workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gpudist import nn
from gpudist.planning import Link, profile_of
from gpudist.planning.clock import Clock, Phase
from gpudist.transport.dry import META, DryTransport
from gpudist.world.partition import Partition

GRID, MIDDLE = (1, 1, 3, 3, 3), 13
# The figures by which nested=None chooses: two kernels and a group without messages take 10.4 us.
PROFILE = replace(
    profile_of("h200"), ranks_per_node=27, node=Link(4.73, 2.33, 24.0), kernel_us=4.0,
    memory_gbps=4109.0, row_ns=0.0,
)  # fmt: skip
LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "halo exchange": lambda P_x, **options: nn.HaloExchange(P_x, halo=[(1, 1)] * 3, **options),
    "convolution": lambda P_x, **options: nn.DistributedConv3d(
        P_x, 1, 1, 3, padding=1, replicate_parameters=True, device=META, **options
    ),
    "region": lambda P_x, **options: nn.HaloRegion(
        P_x, [nn.DistributedAvgPool3d(P_x, 3, 1, 1)], **options
    ),
    "max pool": lambda P_x, **options: nn.DistributedMaxPool3d(P_x, 3, 1, 1, **options),
    "mean pool": lambda P_x, **options: nn.DistributedAvgPool3d(P_x, 3, 1, 1, **options),
    "constant pad": lambda P_x, **options: nn.DistributedConstantPad3d(P_x, 3, 2.0, **options),
    "zero pad": lambda P_x, **options: nn.DistributedZeroPad3d(P_x, 3, **options),
    "circular pad": lambda P_x, **options: nn.DistributedCircularPad3d(P_x, 3, **options),
}


def phase_of(kind: str, extent: int, channels: int, nested: bool | None) -> Phase:
    """Return what the middle of 27 ranks sends over NCCL, with blocks of ``extent`` cells a dim."""
    clock = Clock(PROFILE, MIDDLE)
    shape = (1, channels, *[extent] * 3)
    extents = tuple(n * parts for n, parts in zip(shape, GRID, strict=True))
    wire = DryTransport(MIDDLE, 27, clock, lambda *_: extents)
    P_x = Partition(wire, range(27)).create_cartesian_topology_partition(GRID)
    layer = LAYERS[kind](P_x, nested=nested)
    layer(torch.empty(shape, device=META))
    return clock.phase


@pytest.mark.parametrize("kind", LAYERS)
def test_every_layer_chooses(kind: str) -> None:
    counts = [phase_of(kind, 8, 1, nested).received for nested in (False, True, None)]
    assert counts == [26, 6, 6]


@pytest.mark.parametrize(("extent", "channels", "faster"), [(16, 1, True), (64, 64, False)])
def test_the_planner_prices_both(extent: int, channels: int, faster: bool) -> None:
    direct_s, nested_s, chosen_s = (
        phase_of("halo exchange", extent, channels, nested).message_s
        for nested in (False, True, None)
    )
    assert (nested_s < direct_s) is faster
    assert chosen_s == min(direct_s, nested_s)
