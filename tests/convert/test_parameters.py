"""Gradients of parameters that a forward reaches otherwise than as attributes of modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gpudist import distribute
from gpudist.world.partition import Partition
from tests.convert.reaching import WAYS, N, Reaching, Way
from tests.convert.training import assert_whole, loss_of, outputs_of
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

TOLERANCE = 1e-10


def assert_gradients_alike(net: Any, alone: Reaching, active: bool = True) -> None:
    found, expected = net.learned(), alone.learned()
    for name, p in expected.items():
        what = f"gradient of {name}"
        if not active:
            continue
        if p.grad is None:
            assert found[name].grad is None, f"{what}: alone it has none"
        else:
            assert_equal_to(found[name].grad, p.grad, TOLERANCE, what)


def step(net: Any, alone: Reaching, seed: int = 1) -> None:
    """Compare outputs and gradients of one call."""
    whole = random_like_all((6, N), seed).requires_grad_()
    expected = outputs_of(alone(whole))
    found = outputs_of(net(own_block(whole, net.P_x)))
    total_alone: Any = 0
    total: Any = 0
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert_whole(b, a, f"output {i}", TOLERANCE)
        cotangent = random_like_all(a.shape, seed + i)
        total_alone = total_alone + (a * cotangent).sum()
        total = total + loss_of(b, cotangent)
    total_alone.backward()
    total.backward()
    assert_gradients_alike(net, alone, net.P_x.active)


def both(P_world: Partition, way: Way, **options: Any) -> tuple[Any, Reaching]:
    alone = Reaching(way).double()
    alone.plain = alone.plain.detach().double().requires_grad_()
    for layer in alone.unlisted_layers:
        layer.double()
    alone.unlisted["u"].data = alone.unlisted["u"].data.double()
    return distribute(alone, grid(P_world, [P_world.size, 1]), **options), alone


@pytest.mark.filterwarnings("ignore:.*no rule for blocks")
@pytest.mark.parametrize("way", WAYS)
@distributed(ranks=2, transports=["loopback"])
def test_ways(P_world: Partition, way: str) -> None:
    net, alone = both(P_world, WAYS[way])
    for seed in (1, 2):
        step(net, alone, seed)
