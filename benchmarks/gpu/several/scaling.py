"""Strong and weak scaling: the same work on one GPU, and on all of them.

Strong: the global shape is fixed, and the peer does all the work on the first rank. Weak: every
rank's block is fixed, and the peer computes one block on the first rank. The other ranks sleep
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.case import Side
from benchmarks.gpu.kernel import equal_to
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several import unet
from benchmarks.gpu.several.cells import cells, grid_of, own
from benchmarks.layers import block_of, both_ways
from benchmarks.rows import ONE_BLOCK, ONE_RANK
from gpudist import SlidingWindow
from gpudist.geometry.boxes import Box
from gpudist.nn import DistributedConv2d
from gpudist.ops import HaloExchange
from gpudist.world.partition import CartesianPartition, Partition

STRONG, WEAK = "strong", "weak"
CHANNELS = 32
# Relative bound, in Euclidean norm, for results whose products are rounded to tf32.
TOLERANCE = 2e-3
Shape = tuple[int, ...]
# Global shape for strong scaling, and a rank's block for weak scaling.
SHAPES: dict[str, dict[str, Shape]] = {
    "halo exchange": {STRONG: (1, 8, 8192, 8192), WEAK: (1, 8, 4096, 4096)},
    "conv layer": {STRONG: (1, CHANNELS, 2048, 2048), WEAK: (1, CHANNELS, 1024, 1024)},
    "U-Net step": {STRONG: (1, 1, 128, 128, 128), WEAK: (1, 1, 96, 96, 96)},
}
TINY: dict[str, dict[str, Shape]] = {
    "halo exchange": {STRONG: (1, 2, 12, 12), WEAK: (1, 2, 6, 6)},
    "conv layer": {STRONG: (1, CHANNELS, 12, 12), WEAK: (1, CHANNELS, 6, 6)},
    "U-Net step": {WEAK: (1, 1, 16, 16, 16)},
}


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases, without bytes: the result is the time relative to one rank."""
    found: list[GpuCase] = []
    for work, shapes in (TINY if tiny else SHAPES).items():
        for kind, shape in shapes.items():
            grid = grid_of(ranks, len(shape))
            whole = _fitting(shape, grid) if kind == STRONG else _times(shape, grid)
            alone = whole if kind == STRONG else shape
            where = "global" if kind == STRONG else "a rank"
            name = f"{kind}, {work}, [{','.join(map(str, alone))}] {where}"
            parameters = {"work": work, "kind": kind, "grid": grid, "whole": whole, "alone": alone}
            parameters["width"] = unet.TINY_WIDTH if tiny else unet.WIDTH
            found.append(GpuCase("scaling", name, ranks, 0, parameters))
    return found


def _times(shape: Shape, grid: Shape) -> Shape:
    return tuple(n * parts for n, parts in zip(shape, grid, strict=True))


def _fitting(shape: Shape, grid: Shape) -> Shape:
    grains = [parts * (8 if n >= 8 * parts else 1) for n, parts in zip(shape, grid, strict=True)]
    return tuple(-(-n // grain) * grain for n, grain in zip(shape, grains, strict=True))


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    ours, alone = _WORKS[case.parameters["work"]]
    P_x = P_world.create_cartesian_topology_partition(case.parameters["grid"])
    name = ONE_RANK if case.parameters["kind"] == STRONG else ONE_BLOCK
    asleep = Side(lambda: None, lambda nothing: nothing is None)
    found = {"gpudist": ours(P_x, case.parameters["whole"], case)}
    found[name] = alone(P_x, case.parameters["alone"], case) if P_world.rank == 0 else asleep
    return found


def _halo(P_x: CartesianPartition, shape: Shape, case: GpuCase) -> Side:
    x = own(shape, P_x)
    exchange = HaloExchange(P_x, [SlidingWindow(3, padding=(1, 1))] * (len(shape) - 2))
    return Side(lambda: exchange(x), equal_to(own(shape, P_x, width=1)))


def _padded(P_x: CartesianPartition, shape: Shape, case: GpuCase) -> Side:
    x = cells(shape, Box.whole(shape), P_x.device)
    around = (1, 1) * (len(shape) - 2)
    return Side(lambda: F.pad(x, around), equal_to(F.pad(x, around)))


def _conv(P_x: CartesianPartition, shape: Shape, case: GpuCase) -> Side:
    sequential, x, gy = _layer(shape, P_x.device)
    expected = tuple(block_of(t, P_x) for t in _exact(sequential, x, gy)[:2])
    torch.manual_seed(0)
    layer = DistributedConv2d(P_x, shape[1], shape[1], 3, padding=1).to(P_x.device)
    x, gy = block_of(x, P_x), block_of(gy, P_x)
    return Side(lambda: both_ways(layer, x, gy), _close_to(expected))


def _plain_conv(P_x: CartesianPartition, shape: Shape, case: GpuCase) -> Side:
    layer, x, gy = _layer(shape, P_x.device)
    return Side(lambda: both_ways(layer, x, gy), _close_to(_exact(layer, x, gy)[:2]))


def _layer(
    shape: Shape, device: torch.device
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(shape[1], shape[1], 3, padding=1).to(device)
    x, gy = (cells(shape, Box.whole(shape), device, seed) / 8 - 1 for seed in (0, 1))
    return layer, x, gy


def _exact(layer: torch.nn.Module, x: torch.Tensor, gy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return both_ways(layer, x, gy)


def _close_to(expected: tuple[torch.Tensor, ...]) -> Callable[[tuple[torch.Tensor, ...]], bool]:
    return lambda results: all(
        a.shape == b.shape and bool((a - b).norm() <= TOLERANCE * b.norm())
        for a, b in zip(results, expected, strict=False)
    )


def _unet(P_x: CartesianPartition, shape: Shape, case: GpuCase) -> Side:
    return unet.ours(P_x, shape, case.parameters["width"])


def _unet_alone(P_x: CartesianPartition, shape: Shape, case: GpuCase) -> Side:
    return unet.alone(P_x.world, shape, case.parameters["width"])


Make = Callable[[CartesianPartition, Shape, GpuCase], Side]
_WORKS: dict[str, tuple[Make, Make]] = {
    "halo exchange": (_halo, _padded),
    "conv layer": (_conv, _plain_conv),
    "U-Net step": (_unet, _unet_alone),
}
