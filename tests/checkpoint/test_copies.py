"""Checkpoints of networks whose workers hold different copies: written, with a warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpudist
from gpudist import checkpoint
from tests.pool import distributed


def network(first: float) -> nn.Sequential:
    made: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    made.register_buffer("passing", torch.full((2,), first), persistent=False)
    nn.init.constant_(made[2].weight, first)
    return made


def texts_of(module: nn.Module, path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.save(module, path)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("path", ["", "inner"])
@distributed(ranks=3, transports=["host", "gloo"])
def test_different_copies_are_named_and_saved(P_world: Any, path: str, tmp_path: Path) -> None:
    net: Any = gpudist.distribute(network(float(P_world.rank == 2)), P_world.grid(3, 1))
    module = nn.ModuleDict({path: net}) if path else net
    texts = texts_of(module, tmp_path / "saved")
    assert len(texts) == (P_world.rank == 0)
    for text in texts:
        name = f"{path}.2.weight" if path else "2.weight"
        assert f"parameter {name!r} (float32 [3, 3]) of rank 2 differs from that of rank 0" in text
        assert "1 of 8 tensors do" in text and "broadcast_parameters=True" in text
    checkpoint.load(module, tmp_path / "saved")
    assert torch.equal(net[2].weight, torch.zeros(3, 3))
    assert texts_of(module, tmp_path / "saved") == []


@distributed(ranks=2, transports=["host", "gloo"])
def test_equal_copies_are_saved_quietly(P_world: Any, tmp_path: Path) -> None:
    P_x = P_world.grid(2, 1)
    net: Any = gpudist.distribute(network(P_world.rank), P_x, broadcast_parameters=True)
    assert texts_of(net, tmp_path / "saved") == []
    net = gpudist.distribute(network(P_world.rank), P_x, replicate_parameters=False)
    assert texts_of(net, tmp_path / "saved") == []
    net = gpudist.distribute(network(0), P_x, local_buffers=["1.running_mean"])
    net[1].running_mean.fill_(P_world.rank)
    assert texts_of(net, tmp_path / "saved") == []
    # Modules that were not converted may differ: the checkpoint keeps those of rank 0.
    both = nn.ModuleList([gpudist.distribute(network(0), P_x), network(P_world.rank)])
    assert texts_of(both, tmp_path / "saved") == []


@distributed(ranks=2, transports=["host", "gloo"])
def test_a_warning_that_raises_comes_last(P_world: Any, tmp_path: Path) -> None:
    net: Any = gpudist.distribute(network(P_world.rank), P_world.grid(2, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if P_world.rank == 0:
            with pytest.raises(UserWarning, match=r"'2\.weight'"):
                checkpoint.save(net, tmp_path / "saved")
        else:
            checkpoint.save(net, tmp_path / "saved")
    checkpoint.load(net, tmp_path / "saved")
    assert torch.equal(net[2].weight, torch.zeros(3, 3))


@distributed(ranks=4, transports=["host", "gloo"])
def test_replicated_blocks_of_layers(P_world: Any, tmp_path: Path) -> None:
    layer = gpudist.nn.DistributedConv2d(
        P_world.grid(2, 1, 2, 1), 1, 2, 3, padding=1, replicate_parameters=True
    )
    assert texts_of(layer, tmp_path / "saved") == []
    nn.init.constant_(layer.bias, float(P_world.rank == 3))
    texts = texts_of(layer, tmp_path / "saved")
    assert len(texts) == (P_world.rank == 0)
    assert all("parameter 'bias' (float32 [2]) of rank 3 differs" in text for text in texts)
