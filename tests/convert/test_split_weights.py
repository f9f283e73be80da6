"""Weights that a plan splits over workers by their channels, for convolutions of every kind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist import ConversionError, Plan, distribute, plan_of
from gpudist.geometry.layout import broadcast
from gpudist.world.partition import Partition
from tests.convert.networks import UNet3d
from tests.convert.training import assert_as_alone, assert_gradients, assert_whole
from tests.nn.compare import (
    assert_block_of,
    gradient_of,
    grid,
    own_block,
    own_slices,
    random_like_all,
)
from tests.pool import distributed

CONVS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Shape = tuple[int, ...]


def factored(workers: int, axes: int, rng: random.Random) -> Shape:
    shape = [1] * axes
    for _ in range(workers.bit_length() - 1):
        shape[rng.randrange(axes)] *= 2
    return tuple(shape)


class Case:
    """A convolution, its input, and the grids of the network and of the weight."""

    def __init__(self, number: int, workers: int) -> None:
        rng = random.Random(f"{number} on {workers}")
        self.dims, groups = rng.randint(1, 3), rng.choice((1, 1, 1, 4))
        batch, rows, columns, *space = factored(workers, self.dims + 3, rng)
        if groups > 1:
            rows, columns = rows * columns, 1
        self.shape = batch, rows, columns, *space
        self.channels = [groups * rng.randint(4 // groups, 6 // groups) for _ in range(2)]
        self.options: dict[str, Any] = {
            "kernel_size": rng.randint(1, 3),
            "stride": rng.randint(1, 2),
            "padding": rng.choice((0, 1)),
            "dilation": rng.choice((1, 1, 2)),
            "groups": groups,
            "bias": rng.random() < 0.7,
        }
        kinds = TRANSPOSED if rng.random() < 0.4 else CONVS
        self.kind = kinds[self.dims - 1]
        if kinds is TRANSPOSED:
            self.options["output_padding"] = self.options["stride"] - 1
        elif rng.random() < 0.3:
            self.options["padding_mode"] = rng.choice(("circular", "replicate", "reflect"))
        elif rng.random() < 0.2:
            self.options |= {"padding": "same", "stride": 1, "kernel_size": 3}
        self.P_x = factored(workers, self.dims + 2, rng)
        self.input = rng.randint(1, 3), self.channels[0], *(rng.randint(5, 9),) * self.dims
        self.replicates = rng.random() < 0.7

    def network(self) -> nn.Module:
        return nn.Sequential(self.kind(*self.channels, **self.options), nn.Tanh())

    def split(self, plan: Plan) -> None:
        plan.split_weight("0", self.shape)


def plan_by(edit: Callable[[Plan], None]) -> Plan:
    plan = Plan()
    edit(plan)
    return plan


@pytest.mark.parametrize("number", range(100))
@distributed(ranks=[2, 4], transports=["loopback"])
def test_convolution(P_world: Partition, number: int) -> None:
    case = Case(number, P_world.size)
    rows = plan_of(case.network(), case.P_x, case.input, plan=plan_by(case.split)).rows
    computed = next(row for row in rows if ".conv" in row.function)
    # Padding decides on a layout of its own.
    assert " as " not in computed.inputs or "padding_mode" in case.options, computed
    net = assert_as_alone(
        case.network, grid(P_world, case.P_x), [case.input], case.split,
        replicate_parameters=case.replicates,
    )  # fmt: skip
    weight = net[0].weight
    parts = case.shape[1] * case.shape[2]
    # Blocks of 4 to 6 channels are uneven.
    assert weight.to_local().numel() * parts <= weight.numel() * (1 if parts == 1 else 2)


def bottom_by_channels(plan: Plan) -> None:
    """Split the bottom by rows and then by columns, so that what lies between stays split."""
    plan.split_weight("bottom.0", (1, 2, 1, 2, 1, 1))
    plan.split_weight("bottom.3", (1, 1, 2, 2, 1, 1))
    plan.split_weight("grow.0", (2, 2, 1, 1, 1, 1))
    plan.layout("bottom", [broadcast] * 2, at="input", grid=[2, 2])


def other_plan(plan: Plan) -> None:
    plan.split_weight("bottom.0", (1, 1, 2, 1, 1, 1))
    plan.split_weight("down.1.0", (1, 2, 1, 1, 1, 1))


VOLUME = (2, 1, 8, 8, 8)


@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@distributed(ranks=4, transports=["loopback"])
def test_bottom_of_a_unet(P_world: Partition, replicate: bool) -> None:
    assert_as_alone(
        UNet3d, grid(P_world, [1, 1, 2, 2, 1]), [VOLUME], bottom_by_channels,
        replicate_parameters=replicate,
    )  # fmt: skip


def train(net: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = random_like_all(VOLUME, seed)
    optimizer.zero_grad()
    y = net(own_block(x, net.P_x, requires_grad=False) if hasattr(net, "P_x") else x)
    y.square().mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()


@distributed(ranks=4, transports=["loopback"])
def test_checkpoint_under_another_plan(P_world: Partition, tmp_path: Path) -> None:
    """Training continues on other workers from weights and moments of the optimizer."""
    torch.manual_seed(3)
    alone = UNet3d().double()
    P_x = grid(P_world, [1, 1, 2, 2, 1])
    net: Any = distribute(copy.deepcopy(alone), P_x, plan_by(bottom_by_channels))
    alone = copy.deepcopy(alone)
    steps = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (alone, net)]
    for seed in range(2):
        train(alone, steps[0], seed)
        train(net, steps[1], seed)
    moment: Any = steps[1].state[net.bottom.get_submodule("0").weight]["exp_avg"]
    assert moment.to_local().shape == (2, 4, 3, 3, 3)
    gpudist.checkpoint.save(net, tmp_path / "saved", steps[1])
    drawn = UNet3d().double()
    for other_grid, edit in (([1, 1, 2, 1, 1], other_plan), ([2, 1, 1, 1, 2], lambda plan: None)):
        P_y = grid(P_world, other_grid)
        other: Any = distribute(copy.deepcopy(drawn), P_y, plan_by(edit), broadcast_parameters=True)
        step = torch.optim.AdamW(other.parameters(), lr=0.01)
        gpudist.checkpoint.load(other, tmp_path / "saved", step)
        again, step_alone = copy.deepcopy((alone, steps[0]))
        train(other, step, 5)
        train(again, step_alone, 5)
        found = gpudist.checkpoint.full_state_dict(other, to_all=True)
        for name, expected in again.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-8)


SPLITS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "rows": (lambda: nn.Conv2d(4, 4, 3, padding=1), (1, 4, 1, 1, 1)),
    "rows and space": (lambda: nn.Conv2d(4, 4, 3, padding=1), (1, 2, 1, 2, 1)),
    "columns and space": (lambda: nn.ConvTranspose2d(4, 4, 3, 2, 1), (1, 1, 2, 1, 2)),
    "groups": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (1, 2, 1, 2, 1)),
}


@pytest.mark.parametrize("name", SPLITS)
@distributed(ranks=4, transports=["loopback"])
def test_gradients_of_gradients(P_world: Partition, name: str) -> None:
    """Also of a copy of the network."""
    make, shape = SPLITS[name]
    torch.manual_seed(3)
    alone = nn.Sequential(make(), nn.Tanh()).double()
    P_x = grid(P_world, [1, 1, 4, 1])
    net = copy.deepcopy(
        distribute(copy.deepcopy(alone), P_x, plan_by(lambda plan: plan.split_weight("0", shape)))
    )
    whole = random_like_all((2, 4, 6, 6), 1).requires_grad_()
    block = own_block(whole, P_x)
    slopes: list[torch.Tensor] = []
    for one, x in ((alone, whole), (net, block)):
        (slope,) = torch.autograd.grad(one(x).square().sum(), x, create_graph=True)
        slopes.append(slope)
        slope.square().sum().backward()
    where = own_slices(whole.shape, P_x)
    assert_block_of(block.grad, gradient_of(whole), where, "gradient of the input", 1e-8)
    assert_gradients(net, alone, True)


@pytest.mark.parametrize("name", SPLITS)
@distributed(ranks=4, transports=["loopback"])
def test_autocast(P_world: Partition, name: str) -> None:
    make, shape = SPLITS[name]
    torch.manual_seed(3)
    alone = make()
    P_x = grid(P_world, [1, 1, 4, 1])
    net: Any = distribute(
        copy.deepcopy(alone), P_x, plan_by(lambda plan: plan.split_weight("", shape))
    )
    x = random_like_all((2, 4, 6, 6), 1).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = alone(x), net(input=own_block(x, P_x))
    assert_whole(found, expected, "output", 2e-2)
    expected.float().square().mean().backward()
    found.float().square().mean().backward()
    assert_gradients(net, alone, True, 2e-2)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Shape, str]] = {
    "axes": (
        lambda: nn.Conv2d(4, 4, 3), (1, 2, 1),
        r"0: .* got a Conv2d and a grid \[1, 2, 1\]; .* \[batch, rows, columns, \*space\]",
    ),
    "kind": (lambda: nn.PReLU(4), (1, 2, 1, 1, 1), "0: split_weight got a PReLU"),
    "channels": (
        lambda: nn.ConvTranspose2d(4, 1, 3), (1, 2, 1, 1, 1), "0: out_channels is 1, .* smaller",
    ),
    "groups": (
        lambda: nn.Conv2d(3, 3, 3, groups=3), (1, 2, 1, 1, 1),
        "0: the layer has 3 groups, which 2 rows and 1 columns .* divides the groups",
    ),
    "columns of groups": (
        lambda: nn.Conv2d(4, 4, 3, groups=2), (1, 1, 2, 1, 1), "2 groups, which 1 rows and 2",
    ),
    "computed weight": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), (1, 2, 1, 1, 1),
        "0: .* computed from .*original1'.*; remove its parametrizations",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@distributed(ranks=2, transports=["loopback"])
def test_splits_that_are_refused(P_world: Partition, case: str) -> None:
    make, shape, message = REFUSED[case]
    plan = plan_by(lambda plan: plan.split_weight("0", shape))
    with pytest.raises(ConversionError, match=message):
        distribute(nn.Sequential(make()), grid(P_world, [1, 1, 2, 1]), plan)


@distributed(ranks=2, transports=["loopback"])
def test_inputs_without_samples_are_refused(P_world: Partition) -> None:
    plan = plan_by(lambda plan: plan.split_weight("", (1, 2, 1, 1, 1)))
    net: Any = distribute(nn.Conv2d(1, 4, 3), grid(P_world, [1, 2, 1]), plan)
    with pytest.raises(ConversionError, match="for inputs of 4 dims; change the grid"):
        net(torch.ones(1, 4, 6))
