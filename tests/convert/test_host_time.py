"""Calls of Python's functions that a converted network adds to a step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpudist
from examples.networks import UNet3d
from gpudist.errors import ConversionError
from gpudist.world.partition import Partition
from tests.pool import distributed

_ROOM = str(Path(gpudist.__file__).parent)


class _Chain(torch.nn.Module):
    def __init__(self, make: Callable[[], torch.nn.Module], length: int) -> None:
        super().__init__()
        self.parts = torch.nn.Sequential(*[make() for _ in range(length)])
        self.seen: list[int] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [len(part._forward_pre_hooks) for part in self.parts]
        if self.fails:
            raise ValueError("a mistake")
        return self.parts(x)


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Free the views of earlier tests, for which work in place looks while they live."""
    gc.collect()


def _frames(call: Callable[[], object]) -> int:
    """Return the number of calls of gpudist's functions."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(_ROOM)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


# Frames of one more module, without a gradient.
FRAMES: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "relu": (torch.nn.ReLU, 2),
    "dropout": (lambda: torch.nn.Dropout(0.5), 16),
    "batch_norm": (lambda: torch.nn.BatchNorm2d(3), 5),
    "group_norm": (lambda: torch.nn.GroupNorm(1, 3), 3),
    "layer_norm": (lambda: torch.nn.LayerNorm([3, 8, 8]), 3),
    "convolution": (lambda: torch.nn.Conv2d(3, 3, 1), 2),
}


@pytest.mark.parametrize("name", FRAMES)
@distributed(ranks=1, transports=["loopback"])
def test_frames_of_a_module(P_world: Partition, name: str) -> None:
    make, most = FRAMES[name]
    P_x = P_world.create_cartesian_topology_partition([1, 1, 1, 1])
    counts: list[int] = []
    for length in (2, 12):
        network = gpudist.distribute(_Chain(make, length), P_x, inputs={"x": "block"})
        x = torch.randn(2, 3, 8, 8)
        with torch.no_grad():
            for _ in range(3):
                network(x)
            counts.append(_frames(lambda network=network, x=x: network(x)))
    added = (counts[1] - counts[0]) / 10
    # A key of a cache may be compared with another one of the same hash.
    assert round(added) <= most, added


# Frames of a step of a U-Net of 52 functions, forward and backward.
@pytest.mark.parametrize("is_cast, most", [(False, 340), (True, 418)])
@distributed(ranks=1, transports=["loopback"])
def test_frames_of_a_step(P_world: Partition, is_cast: bool, most: int) -> None:
    P_x = P_world.create_cartesian_topology_partition([1] * 5)
    network = gpudist.distribute(UNet3d(1, 3, 4), P_x)
    criterion = gpudist.nn.DistributedCrossEntropyLoss(P_x)
    x, target = torch.randn(1, 1, 8, 8, 8), torch.randint(3, (1, 8, 8, 8))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            loss = criterion(network(x), target)
        loss.backward()

    for _ in range(3):
        step()
    frames = _frames(step)
    assert frames <= most, frames


@distributed(ranks=1, transports=["loopback"])
def test_modules_have_no_hook_within_a_call_and_refuse_blocks_outside(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 1, 1, 1])
    network = gpudist.distribute(_Chain(torch.nn.ReLU, 3), P_x, inputs={"x": "block"})
    x = torch.randn(2, 3, 8, 8)
    for fails in (False, True, False):
        network.fails = fails
        if fails:
            with pytest.raises(ValueError, match="a mistake"):
                network(x)
        else:
            network(x)
        assert network.seen == [0, 0, 0]
        with pytest.raises(ConversionError, match="outside the network's own methods"):
            network.parts[0](x)


class _Cumulative(torch.nn.Module):
    """Calls a function of a buffer, then of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0))
        self.steps = torch.nn.Buffer(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cumsum(self.steps, 0) * torch.cumsum(self.weight, 0)


@distributed(ranks=2, transports=["loopback"])
def test_a_function_of_plain_tensors_still_gets_copies_of_parameters(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2, 1])
    x, alone = torch.arange(12.0).view(4, 3), _Cumulative()
    alone(x).sum().backward()
    network = gpudist.distribute(_Cumulative(), P_x, inputs={"x": "block"})
    assert P_world.rank is not None
    for _ in range(2):
        network.weight.grad = None
        network(x[2 * P_world.rank :][:2]).sum().backward()
        torch.testing.assert_close(network.weight.grad, alone.weight.grad)


@distributed(ranks=2, transports=["loopback"])
def test_frames_under_a_plan_of_layouts(P_world: Partition) -> None:
    """Functions without a pin cost what they cost without a plan, also after a moved tensor."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 1])
    x = torch.full((1, 3, 4, 8), float(P_world.rank or 0))
    found: list[list[int]] = []
    for plan in (gpudist.Plan(), gpudist.Plan().layout("parts.0", gpudist.sbp.broadcast)):
        calls: list[int] = []
        for length in (2, 12):
            network = gpudist.distribute(_Chain(torch.nn.ReLU, length), P_x, plan)
            for _ in range(3):
                network(x)
            calls.append(_frames(lambda network=network: network(x)))
        found.append(calls)
    without, pinned = ([b - a] for a, b in found)
    assert pinned == without
