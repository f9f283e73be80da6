"""The sequential state dict is assembled from blocks and loaded into blocks, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist.checkpoint import full_state_dict, load_full_state_dict
from gpudist.errors import CheckpointError
from gpudist.nn import DistributedConv1d
from gpudist.transport import TRANSPORTS
from gpudist.world.partition import Partition
from tests.checkpoint.models import (
    Layout,
    assert_same_state,
    both,
    distributed_model,
    fill,
    sequential_model,
)
from tests.nn.compare import grid
from tests.pool import distributed


@pytest.mark.parametrize("layout", ["features", "channels"])
@distributed(ranks=5, transports=tuple(TRANSPORTS))
def test_full_state_dict_is_the_sequential_one(P_world: Partition, layout: Layout) -> None:
    model, sequential = both(P_world, 4, layout)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for to_all in (False, True):
        full = full_state_dict(model, to_all=to_all)
        if to_all or P_world.rank == 0:
            assert_same_state(full, dict(sequential.state_dict()))
            sequential_model().load_state_dict(full)
        else:
            assert full == {}
    assert_same_state(dict(model.state_dict()), before)


@pytest.mark.parametrize("layout", ["features", "channels"])
@pytest.mark.parametrize("root", [0, 3])
@distributed(ranks=5, transports=tuple(TRANSPORTS))
def test_blocks_are_filled_from_one_rank(P_world: Partition, layout: Layout, root: int) -> None:
    expected, sequential = both(P_world, 4, layout)
    model = distributed_model(P_world, 4, layout)
    whole = dict(sequential.state_dict()) if P_world.rank == root else None
    load_full_state_dict(model, whole, root=root)
    assert_same_state(dict(model.state_dict()), dict(expected.state_dict()))


@distributed(ranks=5, transports=("loopback",))
def test_one_layout_loads_the_state_of_another(P_world: Partition) -> None:
    first, sequential = both(P_world, 4, "channels")
    second = distributed_model(P_world, 5, "features")
    load_full_state_dict(second, full_state_dict(first))
    assert_same_state(full_state_dict(second, to_all=True), dict(sequential.state_dict()))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"1.weight": None}, "misses ['1.weight']"),
        ({"9.weight": torch.zeros(2)}, "has no ['9.weight']"),
        ({"5.weight": torch.zeros(7, 12)}, "5.weight: copying a param with shape torch.Size([7,"),
        ({"2.weight": torch.zeros(6)}, "2.weight: copying a param with shape torch.Size([6])"),
        ({"0.bias": 3}, '"0.bias", expected torch.Tensor'),
        ({"2.weight": torch.ones(5).to_sparse()}, "2.weight"),
        ({"2.weight": torch.ones(5, device="meta")}, "2.weight"),
    ],
)
@distributed(ranks=3, transports=("loopback",))
def test_misfit_is_refused_on_every_rank(
    P_world: Partition, changed: dict[str, object], words: str
) -> None:
    model = distributed_model(P_world, 2, "channels")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given: dict[str, object] = dict(sequential_model().state_dict()) | changed
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(CheckpointError) as raised:
        load_full_state_dict(model, given if P_world.rank == 0 else None)
    assert words in str(raised.value)
    assert_same_state(dict(model.state_dict()), before)


@distributed(ranks=2, transports=("loopback",))
def test_root_without_a_state_dict_is_refused_on_every_rank(P_world: Partition) -> None:
    words = r"passed (None|'model.pt' \(str\)) as state_dict, not a dict"
    for given in (None, "model.pt"):
        with pytest.raises(CheckpointError, match=words):
            whole: Any = given if P_world.rank == 0 else None
            load_full_state_dict(distributed_model(P_world, 2, "features"), whole)


@distributed(ranks=2, transports=("loopback",))
def test_other_models_on_other_ranks_are_refused(P_world: Partition) -> None:
    model = DistributedConv1d(grid(P_world, [1, 1, 2]), 2, 3 + P_world.wire.rank, 3)
    with pytest.raises(CheckpointError, match="names and shapes of rank 1"):
        full_state_dict(model)


@distributed(ranks=2, transports=("loopback",))
def test_shared_layer_has_all_its_names(P_world: Partition) -> None:
    def tree(layer: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.ModuleDict({"first": layer, "rest": torch.nn.Sequential(layer)})

    sequential = tree(torch.nn.Conv1d(2, 3, 3))
    fill(sequential)
    model = tree(DistributedConv1d(grid(P_world, [1, 1, 2]), 2, 3, 3))
    load_full_state_dict(model, dict(sequential.state_dict()))
    assert_same_state(full_state_dict(model, to_all=True), dict(sequential.state_dict()))


@distributed(ranks=3, transports=("loopback",))
def test_whole_is_converted_to_the_dtype_of_the_blocks(P_world: Partition) -> None:
    whole = torch.nn.Conv1d(2, 3, 3, dtype=torch.float64)
    fill(whole)
    model = DistributedConv1d(grid(P_world, [1, 1, 3]), 2, 3, 3, dtype=torch.bfloat16)
    load_full_state_dict(model, dict(whole.state_dict()))
    expected = {name: value.bfloat16() for name, value in whole.state_dict().items()}
    assert_same_state(full_state_dict(model, to_all=True), expected)
