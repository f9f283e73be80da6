"""Every layer reports where the blocks of its parameters and buffers are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gpudist.nn as gnn
from gpudist.nn.parameters.parameter_placement import ParameterPlacement, placements
from gpudist.world.partition import Partition
from tests.nn.compare import SEED, grid
from tests.pool import distributed

Make = Callable[[Partition], nn.Module]
Pair = tuple[Make, Callable[[], nn.Module]]

LAYERS: dict[str, Pair] = {
    "conv": (
        lambda P: gnn.DistributedConv2d(grid(P, [1, 1, 2, 2]), 3, 5, 3),
        lambda: nn.Conv2d(3, 5, 3),
    ),
    "conv, split channels": (
        lambda P: gnn.DistributedConv1d(
            grid(P, [1, 2, 1], [1, 2]), grid(P, [1, 2, 1], [3, 0]), grid(P, [2, 2, 1]), 5, 7, 3
        ),
        lambda: nn.Conv1d(5, 7, 3),
    ),
    "conv, groups": (
        lambda P: gnn.DistributedConv1d(grid(P, [1, 2, 2]), 4, 6, 3, groups=2),
        lambda: nn.Conv1d(4, 6, 3, groups=2),
    ),
    "causal": (
        lambda P: gnn.DistributedCausalConv1d(grid(P, [2, 1, 2]), 3, 5, 3),
        lambda: nn.Conv1d(3, 5, 3),
    ),
    "transposed, split channels": (
        lambda P: gnn.DistributedConvTranspose1d(
            grid(P, [1, 2, 1]), grid(P, [1, 2, 1]), grid(P, [2, 2, 1]), 5, 7, 3
        ),
        lambda: nn.ConvTranspose1d(5, 7, 3),
    ),
    "transposed, groups": (
        lambda P: gnn.DistributedConvTranspose1d(grid(P, [1, 2, 2]), 4, 6, 3, groups=2),
        lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
    ),
    "transposed without bias": (
        lambda P: gnn.DistributedConvTranspose2d(grid(P, [1, 1, 2, 2]), 5, 7, 3, bias=False),
        lambda: nn.ConvTranspose2d(5, 7, 3, bias=False),
    ),
    "region": (
        lambda P: gnn.HaloRegion(
            grid(P, [1, 1, 4]),
            [gnn.DistributedConv1d(grid(P, [1, 1, 4]), 2, 3, 3), nn.ReLU()],
        ),
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU()),
    ),
    "linear": (
        lambda P: gnn.DistributedLinear(grid(P, [2, 1], [1, 3]), 5, 7),
        lambda: nn.Linear(5, 7),
    ),
    "linear, split features": (
        lambda P: gnn.DistributedLinear(
            grid(P, [1, 2]), grid(P, [1, 2], [2, 3]), grid(P, [2, 2]), 5, 7
        ),
        lambda: nn.Linear(5, 7),
    ),
    "linear, leading axis": (
        lambda P: gnn.DistributedLinear(
            grid(P, [2, 1]), grid(P, [2, 2]), grid(P, [2, 2, 1], [3, 2, 1, 0]), 5, 7
        ),
        lambda: nn.Linear(5, 7),
    ),
    "embedding": (
        lambda P: gnn.DistributedEmbedding(grid(P, [2, 2], [1, 2, 3, 0]), 7, 3),
        lambda: nn.Embedding(7, 3),
    ),
    "embedding, split": (
        lambda P: gnn.DistributedEmbedding(
            grid(P, [1, 1]), grid(P, [1, 1, 2]), grid(P, [1, 1, 2, 2]), 7, 3
        ),
        lambda: nn.Embedding(7, 3),
    ),
    "batch norm": (
        lambda P: gnn.DistributedBatchNorm2d(grid(P, [1, 2, 1, 2]), 5),
        lambda: nn.BatchNorm2d(5),
    ),
    "batch norm, few channels": (
        lambda P: gnn.DistributedBatchNorm1d(grid(P, [1, 3]), 2),
        lambda: nn.BatchNorm1d(2),
    ),
    "batch norm without state": (
        lambda P: gnn.DistributedBatchNorm1d(
            grid(P, [2, 2]), 5, affine=False, track_running_stats=False
        ),
        lambda: nn.BatchNorm1d(5, affine=False, track_running_stats=False),
    ),
    "group norm": (
        lambda P: gnn.DistributedGroupNorm(grid(P, [1, 2, 2]), 2, 6),
        lambda: nn.GroupNorm(2, 6),
    ),
    "instance norm": (
        lambda P: gnn.DistributedInstanceNorm1d(
            grid(P, [1, 2, 2]), 5, affine=True, track_running_stats=True
        ),
        lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
    ),
    "layer norm": (
        lambda P: gnn.DistributedLayerNorm(grid(P, [1, 2, 2]), (5, 3)),
        lambda: nn.LayerNorm([5, 3]),
    ),
    "rms norm": (
        lambda P: gnn.DistributedRMSNorm(grid(P, [2, 2]), (5,)),
        lambda: nn.RMSNorm([5]),
    ),
    "dropout": (lambda P: gnn.DistributedDropout(grid(P, [2, 2]), seed=3), lambda: nn.Dropout()),
}


def times_owned(placed: ParameterPlacement) -> torch.Tensor:
    """How many workers hold each cell."""
    counts = torch.zeros(placed.shape, dtype=torch.int64)
    for rank in range(placed.P.size):
        counts[placed.box(rank).slices] += 1
    return counts


@pytest.mark.parametrize("name", list(LAYERS))
@distributed(ranks=5, transports=("loopback",))
def test_boxes_are_the_blocks_of_the_sequential_layer(P_world: Partition, name: str) -> None:
    make_distributed, make_sequential = LAYERS[name]
    torch.manual_seed(SEED)
    layer = make_distributed(P_world)
    torch.manual_seed(SEED)
    expected = make_sequential().state_dict()
    placed, state = placements(layer), layer.state_dict()
    assert placed.keys() == state.keys()
    if name != "dropout":
        assert list(state) == list(expected)
    for own, placement in placed.items():
        counts = times_owned(placement)
        assert (counts == placement.copies).all()
        assert placement.is_replicated == (placement.copies > 1)
        box = placement.own_box
        if box is None:
            assert state[own].numel() == 0
        else:
            assert state[own].shape == box.shape
        if own in expected:
            assert placement.shape == expected[own].shape
            if box is not None:
                assert torch.equal(state[own], expected[own][box.slices])


@distributed(ranks=4, transports=("loopback",))
def test_parameters_have_one_owner_and_running_moments_all(P_world: Partition) -> None:
    placed = placements(gnn.DistributedBatchNorm2d(grid(P_world, [1, 2, 1, 2]), 5))
    assert {name: p.copies for name, p in placed.items()} == {
        "weight": 1,
        "bias": 1,
        "running_mean": 2,
        "running_var": 2,
        "num_batches_tracked": 4,
    }


@pytest.mark.parametrize("name", list(LAYERS))
@distributed(ranks=5, transports=("loopback",))
def test_each_cell_has_one_first_copy(P_world: Partition, name: str) -> None:
    for placement in placements(LAYERS[name][0](P_world)).values():
        firsts = torch.zeros(placement.shape, dtype=torch.int64)
        if placement.is_first_copy and placement.own_box is not None:
            firsts[placement.own_box.slices] = 1
        counts = P_world.allreduce_data(firsts.flatten().tolist())
        assert counts == [1] * firsts.numel()


@distributed(ranks=2, transports=("loopback",))
def test_names_are_full_and_those_of_local_layers_absent(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    conv = gnn.DistributedConv1d(P_x, 2, 2, 3, bias=False)
    inner = nn.Sequential(nn.PReLU(), conv)
    tree = nn.ModuleDict({"first": conv, "rest": inner})
    assert list(placements(tree)) == ["first.weight", "rest.1.weight"]
    assert list(placements(conv)) == ["weight"]
