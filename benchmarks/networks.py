"""Training steps of converted networks, compared with the sequential network on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import prod

import torch
from torch import nn

import gpudist
from benchmarks.case import Case, Side
from benchmarks.halo import grid_of
from benchmarks.layers import block_of
from benchmarks.resnet import ResNet18
from benchmarks.training import Training, is_right
from examples.networks import UNet3d
from gpudist.world.partition import Partition

# Network, its arguments, shape of its input, number of classes.
NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], tuple[int, ...], int]] = {
    "U-Net 32^3": (UNet3d, (1, 3, 8), (1, 1, 32, 32, 32), 3),
    "U-Net 64^3": (UNet3d, (1, 3, 8), (1, 1, 64, 64, 64), 3),
    "U-Net 96^3": (UNet3d, (1, 3, 8), (1, 1, 96, 96, 96), 3),
    "ResNet-18 64^2": (ResNet18, (64, 1000), (8, 3, 64, 64), 1000),
    "ResNet-18 256^2": (ResNet18, (64, 1000), (8, 3, 256, 256), 1000),
}
# Cases of the subject `kernels` only.
SMALL = ("U-Net 32^3", "ResNet-18 64^2")
# Omitted to save time for other cases.
ON_TWO_RANKS = ("U-Net 96^3",)


def cases(ranks: int) -> list[Case]:
    """Return the cases. Shapes are global; bytes are a rank's block of the input."""
    names = [name for name in NETWORKS if name not in SMALL]
    return [
        case_of("networks", name, ranks) for name in names if ranks <= 2 or name not in ON_TWO_RANKS
    ]


def case_of(subject: str, network: str, ranks: int) -> Case:
    """Return the case of a network on a grid of ranks."""
    shape = NETWORKS[network][2]
    grid = grid_of(ranks, len(shape))
    words = [",".join(map(str, numbers)) for numbers in (shape, grid)]
    parameters = {"network": network, "shape": shape, "grid": grid}
    name = f"{network}, global [{words[0]}] on [{words[1]}]"
    return Case(subject, name, ranks, prod(shape) * 4 // ranks, parameters)


class Problem:
    """A network with data, alone and converted.

    Attributes:
        expected: the sequential network's step.
    """

    def __init__(self, network: str, shape: tuple[int, ...], grid: Sequence[int]) -> None:
        make, arguments, _, classes = NETWORKS[network]
        self._grid = grid
        torch.manual_seed(0)
        self._network = make(*arguments)
        self._x = torch.randn(shape)
        scores = shape[:1] if isinstance(self._network, ResNet18) else (shape[0], *shape[2:])
        self._target = torch.randint(classes, scores)
        self.expected = self.alone().step()

    def alone(self) -> Training:
        """Return training of the sequential network."""
        return Training(deepcopy(self._network), nn.CrossEntropyLoss(), self._x, self._target)

    def converted(self, P_world: Partition) -> Training:
        """Return training of the converted network."""
        P_x = P_world.create_cartesian_topology_partition(self._grid)
        network = gpudist.distribute(deepcopy(self._network), P_x)
        placement = gpudist.placement.of(P_x)
        copies = (gpudist.sbp.broadcast,) * placement.axes
        target = gpudist.to_global(self._target, placement, copies)
        return Training(network, nn.CrossEntropyLoss(), block_of(self._x, P_x), target)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the loss and the gradients.

    Only rank 0 runs the sequential one.
    """
    problem = Problem(**case.parameters)
    ours = problem.converted(P_world)
    found = {"gpudist": Side(ours.step, lambda r: is_right(r, problem.expected), ours.start_again)}
    if P_world.rank == 0:
        alone = problem.alone()
        side = Side(alone.step, lambda r: is_right(r, problem.expected), alone.start_again)
    else:
        side = Side(lambda: None, lambda nothing: nothing is None)
    return found | {"sequential": side}
