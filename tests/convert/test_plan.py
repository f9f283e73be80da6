"""A plan says what is done, and what it says is done."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpudist import ConversionError, Plan, distribute, plan_of
from gpudist.convert import Row
from gpudist.partition import Partition
from tests.convert.networks import LeNet5
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.pool import distributed

LENET = """\
path          layer                               in            out           repartition   weight
conv1         Conv2d -> DistributedConv2d         [1, 1, 2, 1]  [1, 1, 2, 1]
max_pool2d    max_pool2d -> DistributedMaxPool2d  [1, 1, 2, 1]  [1, 1, 2, 1]
conv2         Conv2d -> DistributedConv2d         [1, 1, 2, 1]  [1, 1, 2, 1]
max_pool2d_1  max_pool2d -> DistributedMaxPool2d  [1, 1, 2, 1]  [1, 1, 2, 1]
view          view -> RepartitionedFlatten        [1, 1, 2, 1]  [2, 1]        [2, 1, 1, 1]
fc1           Linear -> DistributedLinear         [2, 1]        [2, 1]
fc2           Linear -> DistributedLinear         [2, 1]        [2, 1]
fc3           Linear -> DistributedLinear         [2, 1]        [2, 1]"""


@distributed(ranks=2, transports=["loopback"])
def test_plan_prints_as_a_table(P_world: Partition) -> None:
    plan = plan_of(LeNet5(), grid(P_world, [1, 1, 2, 1]))
    assert str(plan) == LENET
    assert plan["view"].repartition == (2, 1, 1, 1)
    with pytest.raises(ConversionError, match="no row 'head'"):
        plan["head"]


def test_plan_prints_by_rich() -> None:
    rich_console = pytest.importorskip("rich.console")
    written = io.StringIO()
    plan = Plan([Row("fc", "Linear", (2, 1), (2, 1))])
    rich_console.Console(file=written, width=100).print(plan)
    assert "repartition" in written.getvalue() and "[2, 1]" in written.getvalue()


@distributed(ranks=3, transports=["loopback"])
def test_edited_repartition(P_world: Partition) -> None:
    """All features on one worker, or the batch over two of three."""
    alone = LeNet5().double()
    P_x = grid(P_world, [1, 1, 3, 1])
    whole = random_like_all((4, 1, 28, 28), 1)
    for shape in ([1, 1, 1, 1], [2, 1, 1, 1]):
        plan = plan_of(alone, P_x)
        plan["view"].repartition = tuple(shape)
        net: Any = distribute(alone, P_x, plan)
        assert net.P_y == grid(P_world, shape[:2])
        y = net(own_block(whole, P_x))
        expected = alone(whole).detach()
        assert_block_of(y.detach(), expected, own_slices(expected.shape, net.P_y), "output")


@distributed(ranks=2, transports=["loopback"])
def test_plan_that_cannot_be(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2, 1])
    plan = plan_of(LeNet5(), P_x)
    plan["view"].repartition = (1, 2, 1, 1)
    with pytest.raises(ConversionError, match=r"view at .*networks.py:\d+: dims 1 to 3 are flat"):
        distribute(LeNet5(), P_x, plan)
    with pytest.raises(ConversionError, match=r"trusts \['head'\], which no forward calls"):
        distribute(LeNet5(), P_x, Plan(trusted={"head"}))


EDITS: dict[str, tuple[Callable[[Plan], None], str]] = {
    "too few axes": (
        lambda plan: plan.repartition("conv2", (2, 1)),
        r"conv2: the plan has \(2, 1\) for a partition of 4 axes",
    ),
    "no numbers": (
        lambda plan: setattr(plan["conv2"], "repartition", "2111"),
        "conv2: the plan has 2111 for a partition of 4 axes",
    ),
    "too many workers": (
        lambda plan: plan.repartition("fc1", (3, 1)),
        r"fc1: the plan has \[3, 1\], of 3 workers, but the network is on 2",
    ),
    "channels": (
        lambda plan: plan.repartition("conv2", (1, 2, 1, 1)),
        r"conv2: DistributedConv2d, dim 1: P_x of shape \[1, 2, 1, 1\] splits",
    ),
    "unknown module": (
        lambda plan: plan.repartition("head", (2, 1, 1, 1)),
        "head: the plan repartitions before it, but no forward calls",
    ),
    "kept function": (
        lambda plan: plan.repartition("relu", (2, 1, 1, 1)),
        "relu: the plan repartitions before it, but no forward calls",
    ),
    "weight of another layer": (
        lambda plan: plan.split_weight("conv2", (2, 1)),
        "conv2: the plan cuts its weight, but no forward calls a linear",
    ),
    "weight of too few axes": (
        lambda plan: plan.split_weight("fc2", (2, 1)),
        r"fc2: the plan cuts the weight by \[2, 1\]; for an input on \[2, 1\], give 3 numbers",
    ),
    "weight on too many workers": (
        lambda plan: plan.split_weight("fc2", (2, 2, 1)),
        r"fc2: the plan has \[2, 2, 1\], of 4 workers, but the network is on 2",
    ),
    "weight and input": (
        lambda plan: (plan.split_weight("fc2", (1, 2, 1)), plan.repartition("fc2", (2, 1)))[0],
        r"fc2: the plan cuts the weight by \[1, 2, 1\], for an input on \[1, 1\], but moves the",
    ),
    "features left split": (
        lambda plan: plan.split_weight("fc1", (1, 2, 1)),
        r"fc2: its input on \[1, 2\] is split along the features; cut the weight too",
    ),
}


@pytest.mark.parametrize("case", EDITS)
@distributed(ranks=2, transports=["loopback"])
def test_edit_that_is_refused(P_world: Partition, case: str) -> None:
    """By the path of the row, before anything is converted."""
    P_x = grid(P_world, [1, 1, 2, 1])
    edit, message = EDITS[case]
    plan = plan_of(LeNet5(), P_x)
    edit(plan)
    with pytest.raises(ConversionError, match=f"^{message}"):
        distribute(LeNet5(), P_x, plan)


class _Function(nn.Module):
    """A forward that is one function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


MOVES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "cat": (lambda x: torch.cat([x, x], 1), "cat: its first argument is no tensor, to repartition"),
    "view": (lambda x: x.view(2, -1, x.shape[2]), "only a reshape to (batch, -1) moves its input"),
}


@pytest.mark.parametrize("path", MOVES)
@distributed(ranks=2, transports=["loopback"])
def test_function_that_cannot_be_moved(P_world: Partition, path: str) -> None:
    function, message = MOVES[path]
    plan = Plan()
    plan.repartition(path, (2, 1, 1))
    with pytest.raises(ConversionError, match=f"^the module: {path} at .*: {re.escape(message)}"):
        distribute(_Function(function), grid(P_world, [1, 1, 2]), plan)


class _Gated(nn.Module):
    """Looks at an option that is no number, as a trace cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            if x.shape[1] == 2:
                x = F.relu(conv(x))
        return x


@distributed(ranks=2, transports=["loopback"])
def test_trusted_module(P_world: Partition) -> None:
    P_x, alone = grid(P_world, [1, 1, 2]), nn.Sequential(_Gated(), nn.Conv1d(2, 3, 3)).double()
    with pytest.raises(ConversionError, match=r"^0: the forward of _Gated cannot be traced"):
        distribute(alone, P_x)
    with pytest.raises(ConversionError, match=r"^1: a trusted module may not have parameters of"):
        distribute(alone, P_x, Plan(trusted={"0", "1"}))
    net: Any = distribute(alone, P_x, Plan(trusted={"0"}))
    assert isinstance(net[0], _Gated)
    whole = random_like_all((2, 2, 9), 1)
    expected = alone(whole).detach()
    y = net(own_block(whole, P_x)).detach()
    assert_block_of(y, expected, own_slices(expected.shape, net.P_y), "output")
