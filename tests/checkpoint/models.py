"""Layers of every kind that has parameters or buffers, sequential and distributed in two ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

import gpudist.nn as gnn
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import grid

Layout = Literal["features", "channels", "replicated"]


def sequential_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(3, 5, 3),
        nn.BatchNorm1d(5),
        nn.PReLU(5),
        nn.Dropout(),
        nn.ConvTranspose1d(5, 7, 3),
        nn.Linear(11, 7),
        nn.LayerNorm([5, 7]),
        nn.Embedding(9, 5),
    )


def distributed_model(P_world: Partition, workers: int, layout: Layout) -> nn.Sequential:
    """The same on the last ``workers`` ranks, cut along features (with or without copies of the
    parameters on all of them), or along channels."""
    ranks = list(range(P_world.size))[-workers:]

    def on(*shape: int, order: Sequence[int] = ranks) -> CartesianPartition:
        return grid(P_world, shape, order if torch.Size(shape).numel() > 1 else order[:1])

    if layout != "channels":
        P_x, replicate = on(1, 1, workers), layout == "replicated"
        return nn.Sequential(
            gnn.DistributedConv1d(P_x, 3, 5, 3, replicate_parameters=replicate),
            gnn.DistributedBatchNorm1d(P_x, 5, replicate_parameters=replicate),
            nn.PReLU(5),
            gnn.DistributedDropout(P_x, seed=3),
            gnn.DistributedConvTranspose1d(P_x, 5, 7, 3, replicate_parameters=replicate),
            gnn.DistributedLinear(on(workers, 1), 11, 7, replicate_parameters=replicate),
            gnn.DistributedLayerNorm(P_x, (5, 7), replicate_parameters=replicate),
            gnn.DistributedEmbedding(on(1, workers), 9, 5, replicate_parameters=replicate),
        )
    half, two = workers // 2, on(1, 2, 1, order=ranks[-2:])
    P_x, backwards = on(1, half, 2), ranks[::-1]
    return nn.Sequential(
        gnn.DistributedConv1d(
            two, on(1, half, 1, order=backwards[:half]), on(half, 2, 1, order=backwards), 3, 5, 3
        ),
        gnn.DistributedBatchNorm1d(P_x, 5),
        nn.PReLU(5),
        gnn.DistributedDropout(P_x, seed=3),
        gnn.DistributedConvTranspose1d(
            two, on(1, half, 1, order=ranks[:half]), on(half, 2, 1), 5, 7, 3
        ),
        gnn.DistributedLinear(on(1, half, order=ranks[:half]), on(1, 2, order=ranks[:2]),
                              on(2, half, order=backwards), 11, 7),
        gnn.DistributedLayerNorm(P_x, (5, 7)),
        gnn.DistributedEmbedding(on(1), on(1, 2, order=ranks[:2]), on(1, half, 2), 9, 5),
    )  # fmt: skip


def fill(model: nn.Module, seed: int = 11) -> None:
    """Give every parameter and buffer of a sequential model other values."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator))
        else:
            value.fill_(seed)


def fill_blocks(model: nn.Module, sequential: nn.Module) -> None:
    """Give the blocks of a distributed model the cells of the sequential one."""
    placed, wholes = placements(model), sequential.state_dict()
    for name, value in model.state_dict().items():
        if name in wholes:
            box = placed[name].own_box if name in placed else None
            if name not in placed:
                value.copy_(wholes[name])
            elif box is not None:
                value.copy_(wholes[name][box.slices])


def both(
    P_world: Partition, workers: int, layout: Layout, seed: int = 11
) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the distributed and the sequential model with equal values."""
    sequential, model = sequential_model(), distributed_model(P_world, workers, layout)
    fill(sequential, seed)
    fill_blocks(model, sequential)
    return model, sequential


def assert_same_state(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name
