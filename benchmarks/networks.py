"""Training steps of converted networks, compared with the sequential network on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

import gpudist
from benchmarks.case import Case, Side
from benchmarks.halo import grid_of
from benchmarks.layers import block_of
from benchmarks.resnet import ResNet18
from examples.networks import UNet3d
from gpudist.world.partition import Partition

LR = 0.01
# Bound of rounding errors of float32 gradients.
TOLERANCE = 0.01
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


@dataclass(frozen=True)
class Step:
    """The loss of a training step, and the gradients by the names of their parameters."""

    loss: float
    gradients: dict[str, torch.Tensor]


class Training:
    """A network, its training data, and the optimizer."""

    def __init__(
        self, network: nn.Module, criterion: nn.Module, x: torch.Tensor, target: torch.Tensor
    ) -> None:
        self._network, self._criterion = network, criterion
        self._x, self._target = x, target
        self._optimizer = torch.optim.SGD(network.parameters(), lr=LR)
        self._initial = {name: t.detach().clone() for name, t in network.state_dict().items()}

    @torch.enable_grad()
    def step(self) -> Step:
        self._optimizer.zero_grad()
        loss = self._criterion(self._network(self._x), self._target)
        loss.backward()
        self._optimizer.step()
        found = {n: p.grad for n, p in self._network.named_parameters() if p.grad is not None}
        return Step(loss.item(), found)

    @torch.no_grad()
    def start_again(self) -> None:
        """Restore the initial weights."""
        for name, t in self._network.state_dict().items():
            t.copy_(self._initial[name])


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


def is_right(result: Step, expected: Step) -> bool:
    """Whether the losses and gradients agree; a parameter's gradient may be on another rank."""
    return abs(result.loss - expected.loss) <= TOLERANCE * expected.loss and all(
        gradient.numel() == 0 or is_close(gradient, expected.gradients[name])
        for name, gradient in result.gradients.items()
    )


def is_close(gradient: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the norm of the difference is small relative to the norm."""
    error = torch.linalg.vector_norm(gradient - expected)
    return bool(error <= TOLERANCE * torch.linalg.vector_norm(expected))
