"""Copies of networks that keep tensors of an earlier call, or something that cannot be copied."""

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
    net: Any = distribute(alone, P_x)
    assert net.kept[0] is expected and not expected.is_leaf
    back: Any = gpudist.sequential(net)
    for again in (net, distribute(back, P_x)):
        torch.testing.assert_close(again(gpudist.scatter(x, P_x)).full_tensor(), expected)
    # Of a converted network that has run.
    back = gpudist.sequential(net)
    kept: Any = back.kept
    assert type(back) is Keeping and kept[2].own is back
    assert kept[0].is_leaf and not kept[1]["next"][1][0].requires_grad
    torch.testing.assert_close(kept[1]["next"][0], 2 * expected.detach())
    for planned in (net, back):
        assert gpudist.plan_of(planned, P_x, (1, 2, 4, 6)).rows


@distributed(ranks=2, transports=("loopback",))
def test_what_cannot_be_copied(P_world: Partition) -> None:
    net: Any = nn.Sequential(nn.Conv2d(2, 2, 1))
    net[0].stream = io.TextIOWrapper(io.BytesIO())
    P_x = P_world.grid(1, 1, 2, 1)
    net = distribute(net, P_x)
    for copied in (
        lambda: gpudist.sequential(net),
        lambda: gpudist.plan_of(net, P_x, (1, 2, 4, 6)),
    ):
        with pytest.raises(ConversionError, match=r"Sequential cannot be .*TextIO.*; delete"):
            copied()


@distributed(ranks=2, transports=("loopback",))
def test_networks_are_not_pickled(P_world: Partition) -> None:
    net = distribute(Keeping(), P_world.grid(1, 1, 2, 1))
    for save in (lambda: torch.save(net, io.BytesIO()), lambda: pickle.dumps([net])):
        with pytest.raises(PartitionError, match=r"use model.state_dict\(\)"):
            save()
    for made in (copy.copy(net), copy.deepcopy(net)):
        assert type(made) is type(net) and made.P_x is net.P_x
        assert made(torch.ones(1, 2, 2, 6)).shape == (1, 2, 4, 6)
