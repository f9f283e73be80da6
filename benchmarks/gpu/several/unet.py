"""Training steps of a 3-D U-Net on all GPUs, compared with the sequential network on one.

Every result is compared with the sequential network's, so volumes must fit on one GPU.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

import gpudist
from benchmarks.case import Side
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several.cells import grid_of
from benchmarks.layers import block_of
from benchmarks.rows import ONE_RANK
from benchmarks.training import Step, Training, is_right
from examples.networks import UNet3d
from gpudist.nn import DistributedCrossEntropyLoss
from gpudist.world.partition import CartesianPartition, Partition

CLASSES, WIDTH, TINY_WIDTH = 3, 16, 4
# Cells per side of the global volume; a multiple of 8 on every rank.
SIDES, TINY = (128, 192), (32,)


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases. Shapes are global; bytes are left out, since arithmetic dominates."""
    return [case("unet", side, ranks, tiny) for side in (TINY if tiny else SIDES)]


def case(subject: str, side: int, ranks: int, tiny: bool) -> GpuCase:
    """Return a step on a volume of ``side`` cells per side, longer where the grid requires it."""
    grid = grid_of(ranks, 5)
    shape = (1, 1, *(-(-side // (8 * parts)) * 8 * parts for parts in grid[2:]))
    name = f"U-Net step, global [{','.join(map(str, shape))}] on [{','.join(map(str, grid))}]"
    parameters = {"shape": shape, "grid": grid, "width": TINY_WIDTH if tiny else WIDTH}
    return GpuCase(subject, name, ranks, 0, parameters)


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    """Return the sides; results are the loss and the gradients.

    Only rank 0 runs the sequential one.
    """
    shape, width = case.parameters["shape"], case.parameters["width"]
    P_x = P_world.create_cartesian_topology_partition(case.parameters["grid"])
    return {"gpudist": ours(P_x, shape, width), ONE_RANK: alone(P_world, shape, width)}


def ours(P_x: CartesianPartition, shape: tuple[int, ...], width: int) -> Side:
    network, x, target = _sequential(shape, width, P_x.device)
    expected = _step(network, x, target)
    P_t = P_x.create_cartesian_topology_partition((P_x.shape[0], *P_x.shape[2:]))
    converted = gpudist.distribute(network, P_x)
    training = Training(
        converted, DistributedCrossEntropyLoss(P_x), block_of(x, P_x), block_of(target, P_t)
    )
    return Side(training.step, lambda step: is_right(step, expected), training.start_again)


def alone(P_world: Partition, shape: tuple[int, ...], width: int) -> Side:
    """Return the sequential step, on the first rank."""
    if P_world.rank != 0:
        return Side(lambda: None, lambda nothing: nothing is None)
    network, x, target = _sequential(shape, width, P_world.device)
    expected = _step(network, x, target)
    training = Training(network, nn.CrossEntropyLoss(), x, target)
    return Side(training.step, lambda step: is_right(step, expected), training.start_again)


def _step(network: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Step:
    return Training(deepcopy(network), nn.CrossEntropyLoss(), x, target).step()


def _sequential(
    shape: tuple[int, ...], width: int, device: torch.device
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    network = UNet3d(1, CLASSES, width)
    x, target = torch.randn(shape), torch.randint(CLASSES, (shape[0], *shape[2:]))
    return network.to(device), x.to(device), target.to(device)
