"""``autograd.Function.apply`` on global tensors, in converted networks and outside of them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist.errors import ConversionError
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.functions import WAYS, Scaled, scaled

T = torch.Tensor


class Network(nn.Module):
    """A convolution, and what is done with its output and a weight, in the forward or outside."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.w = nn.Parameter(torch.tensor([0.5, -1.5]).view(2, 1, 1))
        self.way = way

    def forward(self, x: T) -> T:
        y = self.conv(x)
        return self.way(y, self.w) if self.way else y


def network(way: Any = None) -> Network:
    made = Network(way).double()
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(torch.linspace(-1, 1 + i, p.numel(), dtype=p.dtype).cos().view(p.shape))
    return made


def gradients(made: Any, y: T) -> list[T | None]:
    (y.square().mean() + y.mean()).backward()
    return [p.grad for p in made.parameters()]


def images() -> T:
    return torch.linspace(0, 40, 2 * 2 * 5 * 4, dtype=torch.float64).sin().view(2, 2, 5, 4)


@pytest.mark.filterwarnings("ignore:.*rule for blocks:UserWarning")
@pytest.mark.filterwarnings("ignore:.*are gathered by moving:UserWarning")
@distributed(ranks=2, transports=("loopback",))
def test_every_way_to_apply_a_function(P_world: Partition) -> None:
    """Values and gradients are those of the sequential program, inside and outside."""
    P_x = P_world.grid(1, 1, 2, 1)
    block = gpudist.scatter(images(), P_x)
    failures: list[str] = []
    for name, way in WAYS.items():
        alone = network()
        expected = way(alone.conv(images()), alone.w)
        wanted = gradients(alone, expected)
        for is_inside in (True, False):
            net: Any = gpudist.distribute(network(way if is_inside else None), P_x)
            y = net(block)
            y = y if is_inside else way(y, net.w)
            found = gradients(net, y)
            alike = [torch.allclose(y.full_tensor(), expected, atol=1e-6)]
            for a, b in zip(found, wanted, strict=True):
                alike.append(a is b if a is None or b is None else torch.allclose(a, b, atol=1e-6))
            if not all(alike):
                failures.append(f"{name}, {'inside' if is_inside else 'outside'}: {alike}")
    assert not failures, "\n".join(failures)
