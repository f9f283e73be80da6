"""Layers and a network with parameters in either placement, beside the sequential ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist import nn
from gpudist.nn import DistributedBatchNorm2d, DistributedConv2d, fuse_parameter_movements
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import (
    Cut,
    Slices,
    assert_equal_to,
    gradient_of,
    grid,
    own_block,
    random_like_all,
)

F64 = torch.float64
Shape = Sequence[int]
BATCH = (4, 2, 9, 6)


@dataclass(frozen=True)
class Case:
    """A layer and where its input is; ``P_y`` and ``P_w`` are grids of the first ranks."""

    kind: str
    P_x: Shape
    input_shape: Shape
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    P_y: Shape | None = None
    P_w: Shape | None = None
    sizes: Cut | None = None

    def sequential(self) -> torch.nn.Module:
        return getattr(torch.nn, self.kind)(*self.arguments, dtype=F64, **self.options)

    def distributed(self, P_world: Partition, replicate_parameters: bool) -> torch.nn.Module:
        partitions = [grid(P_world, shape) for shape in self._shapes]
        make = getattr(nn, f"Distributed{self.kind}")
        return make(
            *partitions, *self.arguments, dtype=F64, replicate_parameters=replicate_parameters,
            **self.options,
        )  # fmt: skip

    def partitions(self, P_world: Partition) -> tuple[CartesianPartition, CartesianPartition]:
        """Return the partitions of the input and of the output."""
        return grid(P_world, self.P_x), grid(P_world, self.P_y or self.P_x)

    @property
    def _shapes(self) -> list[Shape]:
        return [shape for shape in (self.P_x, self.P_y, self.P_w) if shape is not None]


def case(
    kind: str, P_x: Shape, input_shape: Shape, *arguments: Any, P_y: Shape | None = None,
    P_w: Shape | None = None, sizes: Cut | None = None, **options: Any,
) -> Case:  # fmt: skip
    return Case(kind, P_x, input_shape, arguments, options, P_y, P_w, sizes)


CASES = [
    case("Conv2d", [2, 1, 2, 1], (3, 2, 7, 5), 2, 3, 3, padding=1),
    case("Conv2d", [1, 1, 2, 2], (2, 2, 8, 8), 2, 3, 3, padding=1, bias=False),
    case("Conv1d", [1, 1, 4], (2, 2, 9), 2, 3, 2, stride=4),
    case("Conv1d", [1, 2, 2], (2, 4, 9), 4, 6, 3, P_y=[1, 1, 2], P_w=[1, 2, 2]),
    case("Conv1d", [1, 1, 2], (2, 4, 9), 4, 6, 3, P_y=[1, 2, 2], P_w=[2, 1, 2]),
    case("Conv1d", [1, 2, 2], (2, 4, 9), 4, 6, 3, groups=2),
    case("ConvTranspose2d", [1, 1, 2, 2], (2, 3, 5, 4), 3, 2, 3, stride=2),
    case("ConvTranspose1d", [1, 2, 2], (2, 4, 5), 4, 6, 3, P_y=[1, 1, 2], P_w=[1, 2, 2]),
    case("Linear", [4, 1], (6, 5), 5, 7),
    case("Linear", [4], (4, 5), 5, 7, P_y=[1], P_w=[1, 4]),
    case("Linear", [2, 2], (5, 5), 5, 7, P_y=[2, 1], P_w=[2, 1, 2]),
    case("Linear", [2, 1], (1, 5), 5, 7, P_y=[2, 2], P_w=[2, 2, 1]),
    case("BatchNorm2d", [2, 1, 2, 1], (4, 3, 5, 5), 3),
    case("BatchNorm1d", [2, 2], (5, 3), 3),
    case("InstanceNorm1d", [2, 1, 2], (4, 3, 5), 3, affine=True),
    case("GroupNorm", [1, 2, 2], (3, 6, 5), 3, 6),
    case("GroupNorm", [2, 2], (3, 6), 3, 6, sizes={1: (4, 2)}),
    case("LayerNorm", [2, 2], (5, 6), 6),
    case("LayerNorm", [2, 2], (5, 6), 6, sizes={1: (1, 5)}),
    case("RMSNorm", [4, 1], (3, 6), 6, eps=1e-6),
]  # fmt: skip


def held_by(layer: Callable[[], torch.nn.Module]) -> Callable[[str, torch.Size], Slices | None]:
    """Return this rank's block of a parameter, at the place that the layer reports."""

    def owned(name: str, shape: torch.Size) -> Slices | None:
        placement = placements(layer())[name]
        assert placement.shape == tuple(shape)
        return None if placement.own_box is None else placement.own_box.slices

    return owned


def sequential_network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1, dtype=F64),
        torch.nn.Tanh(),
        torch.nn.BatchNorm2d(3, dtype=F64),
        torch.nn.Conv2d(3, 2, 3, stride=2, dtype=F64),
    )


def network(P_x: CartesianPartition, fused: bool = True, **options: Any) -> torch.nn.Sequential:
    torch.manual_seed(3)
    options = {"dtype": F64, "replicate_parameters": True, **options}
    made = torch.nn.Sequential(
        DistributedConv2d(P_x, 2, 3, 3, padding=1, **options),
        torch.nn.Tanh(),
        DistributedBatchNorm2d(P_x, 3, **options),
        DistributedConv2d(P_x, 3, 2, 3, stride=2, **options),
    )
    if fused:
        fuse_parameter_movements(made)
    return made


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """This worker's part of a loss that is a sum over the cells of the output."""
    return model(x).pow(2).sum()


def assert_same_gradients(
    model: torch.nn.Module, sequential: torch.nn.Module, P_x: CartesianPartition
) -> None:
    """Check the gradients of this worker's blocks.

    Replicated ones are bitwise equal on all workers.
    """
    others, placed = dict(sequential.named_parameters()), placements(model)
    for name, parameter in model.named_parameters():
        expected, placement = gradient_of(others[name]), placed.get(name)
        if placement is not None and placement.own_box is None:
            assert parameter.numel() == 0 and gradient_of(parameter).shape == (0,), name
            continue
        if placement is not None and placement.own_box is not None:
            expected = expected[placement.own_box.slices]
        assert_equal_to(parameter.grad, expected, 1e-10, name)
        if placement is None or placement.is_replicated:
            bits = gradient_of(parameter).contiguous().view(-1).view(torch.int64).tolist()
            assert all(other == bits for other in P_x.allgather_data(bits)), name


def batches(P_x: CartesianPartition, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = random_like_all(BATCH, seed)
    return whole, own_block(whole, P_x, requires_grad=False)
