"""Networks that keep tensors of an earlier call, or something that cannot be copied."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist import ConversionError, PartitionError, distribute
from gpudist.world.partition import Partition
from tests.pool import distributed


class Keeping(nn.Module):
    """Keeps features of its last call in every kind of container, as a correlation pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = self.conv(x)
        self.kept = [y, {"next": (y * 2, [y.sum()])}, SimpleNamespace(one=y + 1, own=self)]
        return y


@distributed(ranks=2, transports=("loopback",))
def test_kept_features(P_world: Partition) -> None:
    torch.manual_seed(1)
    alone, x = Keeping(), torch.randn(1, 2, 4, 6)
    expected = alone(x)
    P_x = P_world.grid(1, 1, 2, 1)
    net = distribute(alone, P_x)
    kept = net.kept
    assert kept[2].own is net and kept[0].is_leaf and not kept[1]["next"][1][0].requires_grad
    assert torch.equal(kept[1]["next"][0], 2 * expected.detach())
    assert alone.kept[0] is expected and not expected.is_leaf
    for again in (net, distribute(alone, P_x)):
        torch.testing.assert_close(again(gpudist.scatter(x, P_x)).full_tensor(), expected)
    # The copies of a converted network that has run.
    assert isinstance(gpudist.sequential(net), Keeping)
    gpudist.plan_of(alone, P_x, (1, 2, 4, 6))


@distributed(ranks=2, transports=("loopback",))
def test_what_cannot_be_copied(P_world: Partition) -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 1))
    net[0].stream = io.TextIOWrapper(io.BytesIO())  # pyright: ignore
    with pytest.raises(ConversionError, match=r"attribute 'stream' of 0 cannot be copied .*delete"):
        distribute(net, P_world.grid(1, 1, 2, 1))


@distributed(ranks=2, transports=("loopback",))
def test_networks_are_not_pickled(P_world: Partition) -> None:
    net = distribute(Keeping(), P_world.grid(1, 1, 2, 1))
    for save in (lambda: torch.save(net, io.BytesIO()), lambda: pickle.dumps([net])):
        with pytest.raises(PartitionError, match=r"use model.state_dict\(\)"):
            save()
    for made in (copy.copy(net), copy.deepcopy(net)):
        assert type(made) is type(net) and made.P_x is net.P_x
        assert made(torch.ones(1, 2, 2, 6)).shape == (1, 2, 4, 6)
