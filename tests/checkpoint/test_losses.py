"""State dicts hold the weights of losses as torch's do, if every worker has them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.checkpoint import full_state_dict, load_full_state_dict
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed

WEIGHTS: dict[str, tuple[str, dict[str, list[int]]]] = {
    "classes": ("CrossEntropyLoss", {"weight": [4]}),
    "likelihood": ("NLLLoss", {"weight": [4]}),
    "binary": ("BCELoss", {"weight": [1, 6]}),
    "logits": ("BCEWithLogitsLoss", {"weight": [1, 6], "pos_weight": [8, 6]}),
}


@pytest.mark.parametrize("case", WEIGHTS)
@distributed(ranks=3, transports=["loopback"])
def test_weights_are_saved_whole(P_world: Partition, case: str) -> None:
    """Whole weights are saved from, and loaded on, ranks that only get the loss too."""
    kind, shapes = WEIGHTS[case]
    options: dict[str, Any] = {
        name: torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        for name, shape in shapes.items()
    }
    P_x = grid(P_world, [1, 1, 2, 1])
    loss = getattr(nn, f"Distributed{kind}")(P_x, **options)
    placed = placements(loss)
    assert set(placed) == set(shapes)
    assert all(placed[name].P.size == 3 for name in shapes)
    state = full_state_dict(loss, to_all=True)
    alone = getattr(torch.nn, kind)(**options)
    assert list(state) == list(alone.state_dict())
    assert all(torch.equal(value, options[name]) for name, value in state.items())
    load_full_state_dict(loss, {name: value * 2 for name, value in state.items()})
    assert all(torch.equal(getattr(loss, name), 2 * state[name]) for name in shapes)


@distributed(ranks=2, transports=["loopback"])
def test_weights_of_own_cells_are_not_saved(P_world: Partition) -> None:
    """Blocks of 4 and 3 cells, of which no rank knows the other's."""
    assert P_world.rank is not None
    loss = nn.DistributedBCELoss(grid(P_world, [1, 2]), torch.ones(4 - P_world.rank))
    assert loss.weight is not None
    assert not placements(loss) and not loss.state_dict()
