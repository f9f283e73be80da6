"""Strong and weak scaling: the same work on one rank, and on all of them.

Strong: the global shape is fixed. Weak: every rank's block is fixed, and the global shape grows.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from benchmarks.case import Case, Side, equals, pattern, pattern_sum
from benchmarks.halo import grid_of
from benchmarks.layers import are_close, block_of, both_ways, in_double
from benchmarks.rows import NO_COMMUNICATION, ONE_BLOCK, ONE_RANK
from benchmarks.training import Training, is_right
from examples.networks import UNet3d
from gpudist import SlidingWindow
from gpudist.nn import DistributedConv2d, DistributedCrossEntropyLoss
from gpudist.ops import AllSumReduce, HaloExchange
from gpudist.world.partition import CartesianPartition, Partition

STRONG, WEAK = "strong", "weak"
CHANNELS, CLASSES = 16, 3
# Global shape for strong scaling, and block of a rank for weak scaling.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "halo exchange": {STRONG: (1, 8, 1024, 1024), WEAK: (1, 8, 512, 512)},
    "all-sum-reduce": {WEAK: (1, 1, 512, 512)},
    "conv layer": {STRONG: (1, CHANNELS, 512, 512), WEAK: (1, CHANNELS, 256, 256)},
    "U-Net step": {STRONG: (1, 1, 48, 48, 48), WEAK: (1, 1, 32, 32, 32)},
}


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are a rank's block."""
    found: list[Case] = []
    for work, shapes in SHAPES.items():
        for kind, shape in shapes.items():
            grid = grid_of(ranks, len(shape))
            whole = "global" if kind == STRONG else "a rank"
            name = f"{kind}, {work}, [{','.join(map(str, shape))}] {whole}"
            block = prod(shape) * 4 // (ranks if kind == STRONG else 1)
            parameters = {"work": work, "kind": kind, "shape": shape, "grid": grid}
            found.append(Case("scaling", name, ranks, block, parameters))
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides.

    Peers: plain torch on one rank, while the others sleep; and on every rank at once.
    """
    ours, plain = _WORKS[case.parameters["work"]]
    shape, grid = case.parameters["shape"], case.parameters["grid"]
    P_x = P_world.create_cartesian_topology_partition(grid)
    if case.parameters["kind"] == STRONG:
        name, whole = ONE_RANK, shape
        block = tuple(n // parts for n, parts in zip(shape, grid, strict=True))
    else:
        name, block = ONE_BLOCK, shape
        whole = tuple(n * parts for n, parts in zip(shape, grid, strict=True))
    asleep = Side(lambda: None, lambda nothing: nothing is None)
    return {
        "gpudist": ours(P_x, whole),
        name: plain(shape) if P_world.rank == 0 else asleep,
        NO_COMMUNICATION: plain(block),
    }


def _cells(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(pattern(prod(shape), 0)).view(shape)


def _halo(P_x: CartesianPartition, shape: tuple[int, ...]) -> Side:
    whole = _cells(shape)
    x = block_of(whole, P_x)
    exchange = HaloExchange(P_x, [SlidingWindow(3, padding=(1, 1))] * (len(shape) - 2))
    assert P_x.index is not None
    needed = F.pad(whole, (1, 1, 1, 1))
    for dim, index in enumerate(P_x.index[2:], 2):
        needed = needed.narrow(dim, index * x.shape[dim], x.shape[dim] + 2)
    return Side(lambda: exchange(x), equals(needed.numpy().copy()))


def _padded(shape: tuple[int, ...]) -> Side:
    x = _cells(shape)
    expected = np.pad(x.numpy(), [(0, 0), (0, 0), (1, 1), (1, 1)])
    return Side(lambda: F.pad(x, (1, 1, 1, 1)), equals(expected))


def _sum(P_x: CartesianPartition, shape: tuple[int, ...]) -> Side:
    count = prod(shape) // P_x.size
    x = torch.from_numpy(pattern(count, P_x.rank or 0)).view([1] * (len(shape) - 1) + [count])
    all_sum_reduce = AllSumReduce(P_x, range(P_x.dim))
    expected = pattern_sum(count, P_x.size).reshape(x.shape)
    return Side(lambda: all_sum_reduce(x), equals(expected))


def _clone(shape: tuple[int, ...]) -> Side:
    x = _cells(shape)
    return Side(x.clone, equals(x.numpy()))


def _conv(P_x: CartesianPartition, shape: tuple[int, ...]) -> Side:
    torch.manual_seed(0)
    layer = DistributedConv2d(P_x, CHANNELS, CHANNELS, 3, padding=1)
    sequential, x, gy = _sequential_conv(shape)
    y, gx, *parameters = in_double(sequential, x, gy)
    expected = (block_of(y, P_x), block_of(gx, P_x), *parameters)
    x, gy = block_of(x, P_x), block_of(gy, P_x)
    return Side(lambda: both_ways(layer, x, gy), lambda results: are_close(results, expected))


def _plain_conv(shape: tuple[int, ...]) -> Side:
    layer, x, gy = _sequential_conv(shape)
    expected = in_double(layer, x, gy)
    return Side(lambda: both_ways(layer, x, gy), lambda results: are_close(results, expected))


def _sequential_conv(shape: tuple[int, ...]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
    return layer, torch.rand(shape) - 0.5, torch.rand(shape) - 0.5


def _unet(P_x: CartesianPartition, shape: tuple[int, ...]) -> Side:
    network, x, target = _sequential_unet(shape)
    expected = Training(deepcopy(network), nn.CrossEntropyLoss(), x, target).step()
    converted = gpudist.distribute(network, P_x)
    P_t = P_x.create_cartesian_topology_partition((P_x.shape[0], *P_x.shape[2:]))
    training = Training(
        converted, DistributedCrossEntropyLoss(P_x), block_of(x, P_x), block_of(target, P_t)
    )
    return Side(training.step, lambda step: is_right(step, expected), training.start_again)


def _plain_unet(shape: tuple[int, ...]) -> Side:
    network, x, target = _sequential_unet(shape)
    expected = Training(deepcopy(network), nn.CrossEntropyLoss(), x, target).step()
    training = Training(network, nn.CrossEntropyLoss(), x, target)
    return Side(training.step, lambda step: is_right(step, expected), training.start_again)


def _sequential_unet(shape: tuple[int, ...]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    network = UNet3d(1, CLASSES, 8)
    return network, torch.randn(shape), torch.randint(CLASSES, (shape[0], *shape[2:]))


Ours = Callable[[CartesianPartition, tuple[int, ...]], Side]
Plain = Callable[[tuple[int, ...]], Side]
_WORKS: dict[str, tuple[Ours, Plain]] = {
    "halo exchange": (_halo, _padded),
    "all-sum-reduce": (_sum, _clone),
    "conv layer": (_conv, _plain_conv),
    "U-Net step": (_unet, _plain_unet),
}
