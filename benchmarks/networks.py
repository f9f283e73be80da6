"""Training steps of converted networks, compared with the sequential network on one rank."""

from __future__ import annotations

from collections.abc import Callable
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
    "U-Net 64^3": (UNet3d, (1, 3, 8), (1, 1, 64, 64, 64), 3),
    "U-Net 96^3": (UNet3d, (1, 3, 8), (1, 1, 96, 96, 96), 3),
    "ResNet-18 256^2": (ResNet18, (64, 1000), (8, 3, 256, 256), 1000),
}
# Omitted to save time for other cases.
ON_TWO_RANKS = ("U-Net 96^3",)


def cases(ranks: int) -> list[Case]:
    """Return the cases. Shapes are global; bytes are a rank's block of the input."""
    names = [name for name in NETWORKS if ranks <= 2 or name not in ON_TWO_RANKS]
    return [_case_of(name, ranks) for name in names]


def _case_of(network: str, ranks: int) -> Case:
    shape = NETWORKS[network][2]
    grid = grid_of(ranks, len(shape))
    words = [",".join(map(str, numbers)) for numbers in (shape, grid)]
    parameters = {"network": network, "shape": shape, "grid": grid}
    name = f"{network}, global [{words[0]}] on [{words[1]}]"
    return Case("networks", name, ranks, prod(shape) * 4 // ranks, parameters)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides; results are the loss and the gradients.

    Only rank 0 runs the sequential one.
    """
    make, arguments, _, classes = NETWORKS[case.parameters["network"]]
    shape = case.parameters["shape"]
    torch.manual_seed(0)
    network, x = make(*arguments), torch.randn(shape)
    scores = shape[:1] if isinstance(network, ResNet18) else (shape[0], *shape[2:])
    target = torch.randint(classes, scores)

    def alone() -> Training:
        return Training(deepcopy(network), nn.CrossEntropyLoss(), x, target)

    P_x = P_world.create_cartesian_topology_partition(case.parameters["grid"])
    converted = gpudist.distribute(deepcopy(network), P_x)
    placement = gpudist.placement.of(P_x)
    copies = (gpudist.sbp.broadcast,) * placement.axes
    shared = gpudist.to_global(target, placement, copies)
    ours = Training(converted, nn.CrossEntropyLoss(), block_of(x, P_x), shared)
    expected = alone().step()

    def side(training: Training) -> Side:
        return Side(training.step, lambda r: is_right(r, expected), training.start_again)

    asleep = Side(lambda: None, lambda nothing: nothing is None)
    return {"gpudist": side(ours), "sequential": side(alone()) if P_world.rank == 0 else asleep}
