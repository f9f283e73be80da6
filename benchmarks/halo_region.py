"""A chain of convolutions with one wide halo, compared with one halo for each convolution."""

from __future__ import annotations

from math import prod

import torch

from benchmarks.case import Case, Side
from benchmarks.halo import grid_of
from benchmarks.layers import are_close, block_of, both_ways, in_double
from gpudist.nn import DistributedConv2d, HaloRegion
from gpudist.world.partition import Partition

SHAPES = ((1, 8, 64, 64), (1, 8, 256, 256))
LAYERS = 4


def cases(ranks: int) -> list[Case]:
    """Return the cases; shapes are global, with equal channels in and out."""
    found: list[Case] = []
    for shape in SHAPES:
        grid, block = grid_of(ranks, 4), prod(shape) * 4 // ranks
        words = [",".join(map(str, numbers)) for numbers in (shape, grid)]
        name = (
            f"{LAYERS} x {shape[1]}->{shape[1]} channels, 3x3, global [{words[0]}] on [{words[1]}]"
        )
        parameters = {"shape": shape, "grid": grid}
        found.append(Case("halo_region", name, ranks, block, parameters, block))
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the output and the gradients of input and parameters."""
    shape, channels = case.parameters["shape"], case.parameters["shape"][1]
    P_x = P_world.create_cartesian_topology_partition(case.parameters["grid"])
    torch.manual_seed(0)
    layers = [DistributedConv2d(P_x, channels, channels, 3, padding=1) for _ in range(LAYERS)]
    torch.manual_seed(0)
    sequential = torch.nn.Sequential(
        *(torch.nn.Conv2d(channels, channels, 3, padding=1) for _ in range(LAYERS))
    )
    x, gy = torch.rand(shape) - 0.5, torch.rand(shape) - 0.5
    y, gx, *parameters = in_double(sequential, x, gy)
    expected = (block_of(y, P_x), block_of(gx, P_x), *parameters)
    x, gy = block_of(x, P_x), block_of(gy, P_x)

    def side(module: torch.nn.Module) -> Side:
        return Side(lambda: both_ways(module, x, gy), lambda results: are_close(results, expected))

    return {
        "gpudist": side(HaloRegion(P_x, layers)),
        "layer by layer": side(torch.nn.Sequential(*layers)),
    }
