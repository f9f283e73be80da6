"""Plans that move tensors and cut weights change where things are, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpudist import Plan, plan_of
from gpudist.partition import Partition
from tests.convert.networks import LeNet5
from tests.convert.training import assert_as_alone
from tests.nn.compare import grid
from tests.pool import distributed


class UNet(nn.Module):
    """Two levels, with a skip connection, and a block without a layer's name at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU())
        self.bottom = Bottom()
        self.grow = nn.ConvTranspose2d(2, 2, 2, stride=2)
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        x = self.bottom(F.max_pool2d(skip, 2))
        x = F.interpolate(x, scale_factor=1.0)
        return self.head(torch.cat([skip, self.grow(x)], 1))


class Bottom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.act = nn.PReLU()
        self.scale = nn.Parameter(torch.full((2, 1, 1), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.conv(x)) * self.scale


def _to_batch_and_back(plan: Plan) -> None:
    plan.repartition("bottom", (4, 1, 1, 1))
    plan.repartition("grow", (1, 1, 2, 2))


def _to_fewer_workers(plan: Plan) -> None:
    plan.repartition("bottom", (1, 1, 3, 1))
    plan.repartition("interpolate", (1, 1, 1, 2))
    plan.repartition("grow", [1, 1, 2, 2])


def _to_one_worker(plan: Plan) -> None:
    plan.repartition("max_pool2d", (1, 1, 1, 1))
    plan.repartition("head", (1, 1, 1, 1))
    plan.repartition("grow", (1, 1, 2, 2))


@pytest.mark.parametrize("replicate", [True, False])
@pytest.mark.parametrize("edit", [_to_batch_and_back, _to_fewer_workers, _to_one_worker])
@distributed(ranks=5, transports=["loopback"])
def test_deep_layers_elsewhere(
    P_world: Partition, edit: Callable[[Plan], None], replicate: bool
) -> None:
    """The batch is split at the bottom, and the image again where it meets the skip."""
    P_x = grid(P_world, [1, 1, 2, 2])
    assert_as_alone(UNet, P_x, [(5, 1, 10, 12)], edit, replicate_parameters=replicate)


@distributed(ranks=2, transports=["loopback"])
def test_sequential_is_moved_as_a_whole(P_world: Partition) -> None:
    """Before the first of its layers, by the path of the container."""

    def edit(plan: Plan) -> None:
        plan.repartition("1", (2, 1, 1))

    def make() -> nn.Module:
        inner = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.ReLU())
        return nn.Sequential(nn.Conv1d(1, 2, 3), inner, nn.Tanh())

    P_x = grid(P_world, [1, 1, 2])
    net = assert_as_alone(make, P_x, [(3, 1, 9)], edit)
    assert list(net.P_y.shape) == [2, 1, 1]


@distributed(ranks=4, transports=["loopback"])
def test_moves_are_rows(P_world: Partition) -> None:
    """Also before what is no layer; the plan that is returned does the same again."""
    P_x = grid(P_world, [1, 1, 2, 2])
    plan = plan_of(UNet(), P_x)
    _to_batch_and_back(plan)
    again = plan_of(UNet(), P_x, plan)
    assert again["bottom"].layer == "Repartition"
    assert again["bottom"].repartition == again["bottom"].target == (4, 1, 1, 1)
    assert again["bottom"].source == again["grow"].target == (1, 1, 2, 2)
    assert again["grow"].source == again["bottom.conv"].target == (4, 1, 1, 1)
    assert again["grow"].layer == "ConvTranspose2d -> DistributedConvTranspose2d"
    assert str(plan_of(UNet(), P_x, again)) == str(again)


# Where the input of the first dense layer is, how the weights are cut, and where the output is.
CUTS: dict[str, tuple[dict[str, tuple[int, ...]], list[int]]] = {
    "rows, then columns": ({"fc1": (1, 2, 1), "fc2": (1, 1, 2), "fc3": (1, 3, 1)}, [1, 3]),
    "both": ({"fc1": (1, 2, 1), "fc2": (1, 2, 2), "fc3": (1, 1, 2)}, [1, 1]),
    "batch and rows": ({"fc1": (2, 2, 1), "fc2": (2, 1, 2), "fc3": (4, 1, 1)}, [4, 1]),
    "columns": ({"fc1": (1, 1, 4)}, [1, 1]),
}


@pytest.mark.parametrize("replicate", [True, False])
@pytest.mark.parametrize("case", CUTS)
@distributed(ranks=4, transports=["loopback"])
def test_weights_of_linear_layers(P_world: Partition, case: str, replicate: bool) -> None:
    cuts, output = CUTS[case]

    def edit(plan: Plan) -> None:
        for path, shape in cuts.items():
            plan.split_weight(path, shape)

    P_x = grid(P_world, [1, 1, 2, 2])
    net: Any = assert_as_alone(LeNet5, P_x, [(5, 1, 28, 28)], edit, replicate_parameters=replicate)
    assert list(net.P_y.shape) == output
    first = next(iter(cuts.values()))
    assert net.fc1.P_w.shape == first


@distributed(ranks=4, transports=["loopback"])
def test_cut_weights_are_in_the_table(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    plan = plan_of(LeNet5(), P_x)
    plan.split_weight("fc1", (1, 4, 1))
    plan["fc2"].weight = (1, 1, 4)
    again = plan_of(LeNet5(), P_x, plan)
    assert again["fc1"].repartition == (1, 1) and again["fc1"].source == (4, 1)
    assert again["fc1"].target == again["fc2"].source == (1, 4)
    assert str(again).splitlines()[-2].split() == (
        ["fc2", "Linear", "->", "DistributedLinear", "[1,", "4]", "[1,", "1]", "[1,", "1,", "4]"]
    )
    assert str(plan_of(LeNet5(), P_x, again)) == str(again)
