"""A checkpoint of one layout loads into others and into plain torch, and is never incomplete."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gpudist import checkpoint
from gpudist.checkpoint import folders
from gpudist.checkpoint.block_tensor import BlockTensor
from gpudist.checkpoint.identity import new_identity
from gpudist.checkpoint.reader import METADATA, read_pickled
from gpudist.errors import CheckpointError
from gpudist.nn.parameters.parameter_placement import placements
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.checkpoint.models import (
    Layout,
    assert_same_state,
    both,
    distributed_model,
    fill,
    fill_blocks,
    sequential_model,
)
from tests.checkpoint.optimizers import assert_same_optimizer, new_optimizer, stepped
from tests.every import EVERY
from tests.pool import distributed

Setup = tuple[int, Layout]
SETUPS: list[Setup] = [
    (4, "features"),
    (4, "channels"),
    (2, "channels"),
    (6, "features"),
    (4, "replicated"),
]


def make(P_world: Partition, setup: Setup, seed: int) -> tuple[Any, Any, Any, Any]:
    """Return a model and its optimizer after two steps, then the sequential ones."""
    model, sequential = both(P_world, *setup, seed)
    return (
        model, stepped("adam", model, sequential),
        sequential, stepped("adam", sequential, sequential),
    )  # fmt: skip


def save(P_world: Partition, path: Path, setup: Setup, seed: int = 11) -> None:
    model, optimizer, _, _ = make(P_world, setup, seed)
    checkpoint.save(model, path, optimizer)


def assert_loads(P_world: Partition, path: Path, setup: Setup, seed: int = 11) -> None:
    """Check that a save with ``seed`` fills another model as the sequential state does."""
    expected, expected_optimizer, _, _ = make(P_world, setup, seed)
    model, optimizer, _, _ = make(P_world, setup, seed + 1)
    optimizer = new_optimizer("adam", optimizer)
    checkpoint.load(model, path, optimizer)
    assert_same_state(dict(model.state_dict()), dict(expected.state_dict()))
    assert_same_optimizer(optimizer.state_dict(), expected_optimizer.state_dict())


@distributed(ranks=6, transports=("loopback",))
def test_any_layout_loads_what_any_other_saved(P_world: Partition, shared_path: str) -> None:
    path = Path(shared_path)
    for seed, saved in enumerate(SETUPS):
        save(P_world, path, saved, seed)
        for loaded in SETUPS if EVERY else [SETUPS[seed - 2]]:
            assert_loads(P_world, path, loaded, seed)


@distributed(ranks=4, transports=("host", "gloo", "nccl"))
def test_processes_load_what_processes_saved(P_world: Partition, shared_path: str) -> None:
    save(P_world, Path(shared_path), (4, "channels"))
    assert_loads(P_world, Path(shared_path), (2, "features"))


@pytest.fixture
def shared_path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "checkpoint")


def test_worlds_of_other_sizes_and_plain_torch_load_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_distributed(save, 4, path, (4, "channels"))
    for size, setup in ((2, (2, "features")), (6, (6, "channels")), (5, (2, "replicated"))):
        run_distributed(assert_loads, size, path, setup)
    expected = sequential_model()
    fill(expected)
    expected_optimizer = stepped("adam", expected, expected)
    model = sequential_model()
    state: dict[str, Any] = {"model": model.state_dict()}
    state["optimizer"] = {
        "state": {
            name: {"exp_avg": torch.zeros_like(p), "step": torch.zeros(())}
            for name, p in model.named_parameters()
        }
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    assert_same_state(dict(model.state_dict()), dict(expected.state_dict()))
    for name, parameter in expected.named_parameters():
        read, kept = state["optimizer"]["state"][name], expected_optimizer.state[parameter]
        assert torch.equal(read["exp_avg"], kept["exp_avg"]) and read["step"] == kept["step"]


def test_what_plain_torch_saved_is_loaded(tmp_path: Path) -> None:
    sequential = sequential_model()
    fill(sequential)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": sequential.state_dict()}, checkpoint_id=tmp_path / "checkpoint")

    def check(P_world: Partition) -> None:
        expected = distributed_model(P_world, 4, "channels")
        fill_blocks(expected, sequential)
        model = distributed_model(P_world, 4, "channels")
        checkpoint.load(model, tmp_path / "checkpoint")
        assert_same_state(dict(model.state_dict()), dict(expected.state_dict()))

    run_distributed(check, 4)


@distributed(ranks=3, transports=("loopback", "host"))
def test_other_models_are_refused_on_every_rank(P_world: Partition, shared_path: str) -> None:
    save(P_world, Path(shared_path), (2, "channels"))
    other = distributed_model(P_world, 2, "features")
    before = {name: value.clone() for name, value in other.state_dict().items()}
    other.append(torch.nn.PReLU(3))
    with pytest.raises(CheckpointError, match=r"it misses 8\.weight"):
        checkpoint.load(other, shared_path)
    del other[8]
    other[2] = torch.nn.PReLU(3)
    with pytest.raises(CheckpointError, match=r"2\.weight has shape \[5\], not \[3\]"):
        checkpoint.load(other, shared_path)
    other[2] = torch.nn.Identity()
    with pytest.raises(CheckpointError, match=r"the model has no 2\.weight"):
        checkpoint.load(other, shared_path)
    del before["2.weight"]
    assert_same_state(dict(other.state_dict()), before)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([2], "the optimizer has no parameter 1.weight"),
        ([12], "it has 2 groups of parameters, but the optimizer has 1"),
        ([1, 11], "a group has parameters ['0.weight', '0.bias'], not ['0.weight']"),
    ],
)
@distributed(ranks=2, transports=("loopback", "host"))
def test_other_optimizers_are_refused_on_every_rank(
    P_world: Partition, shared_path: str, sizes: list[int], words: str
) -> None:
    """Refuse an optimizer with other groups before rank 0 reads a missing file.

    The saved optimizer has a group of 2 parameters and one of 10.
    """
    save(P_world, Path(shared_path), (2, "channels"))
    if P_world.rank == 1:
        (Path(shared_path) / "__1_0.distcp").unlink()
    P_world.barrier()
    model = distributed_model(P_world, 2, "replicated")
    parameters = model.parameters()
    groups = [{"params": [*islice(parameters, size)]} for size in sizes]
    optimizer = torch.optim.Adam(groups)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        checkpoint.load(model, shared_path, optimizer)
    assert not optimizer.state


def assert_refused_unchanged(
    model: torch.nn.Module, path: str, optimizer: torch.optim.Optimizer, words: str
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    before_optimizer = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(model, path, optimizer)
    assert_same_state(dict(model.state_dict()), before)
    assert_same_optimizer(optimizer.state_dict(), before_optimizer)


@distributed(ranks=3, transports=("loopback", "host"))
def test_other_optimizer_on_one_rank_changes_nothing_on_any(
    P_world: Partition, shared_path: str
) -> None:
    save(P_world, Path(shared_path), (2, "features"))
    model, optimizer, _, _ = make(P_world, (2, "features"), seed=12)
    if P_world.rank == 1:
        first, second = (group["params"] for group in optimizer.param_groups)
        first[1], second[0] = second[0], first[1]
    stored, own = ["0.weight", "0.bias"], ["0.weight", "1.weight"]
    words = re.escape(f"rank 1: a group has parameters {stored}, not {own}")
    assert_refused_unchanged(model, shared_path, optimizer, words)


@distributed(ranks=3, transports=("loopback", "host"))
def test_state_that_the_optimizer_does_not_take_changes_nothing(
    P_world: Partition, shared_path: str
) -> None:
    """Adam wants steps, which SGD does not keep."""
    model, _, sequential, _ = make(P_world, (2, "features"), seed=11)
    checkpoint.save(model, shared_path, stepped("sgd", model, sequential))
    model, optimizer, _, _ = make(P_world, (2, "features"), seed=12)
    words = "the optimizer does not take the state: KeyError: 'step'"
    assert_refused_unchanged(model, shared_path, optimizer, words)


@distributed(ranks=2, transports=("loopback",))
def test_block_of_a_state_dict_has_no_arithmetic(P_world: Partition) -> None:
    layer: Any = distributed_model(P_world, 2, "features")[0]
    x = BlockTensor(layer.weight, placements(layer)["weight"])
    for use in (lambda: x + 1, x.sum, x.clone):
        with pytest.raises(
            NotImplementedError, match=r"aten\..* of a block in a state dict is not supported; save"
        ):
            use()


@distributed(ranks=3, transports=("loopback", "host"))
def test_interrupted_save_leaves_the_one_before(P_world: Partition, shared_path: str) -> None:
    path = Path(shared_path)
    save(P_world, path, (2, "channels"), seed=1)
    model, optimizer, _, _ = make(P_world, (2, "features"), seed=2)
    if P_world.rank == 1:
        broken = torch.nn.Module.state_dict(model)
        model.state_dict = lambda: {**broken, "0.weight": Unwritable(broken["0.weight"])}
    with pytest.raises(CheckpointError, match=r"rank 1: OSError: no space"):
        checkpoint.save(model, path, optimizer)
    assert_loads(P_world, path, (2, "features"), seed=1)
    assert sorted(os.listdir(path.parent)) == ["checkpoint"]


class Unwritable(torch.Tensor):
    """A tensor whose cells cannot be had, as on a full disk."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Unwritable:
        return torch.Tensor._make_subclass(cls, x)

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        raise OSError("no space left on device")


def test_what_fails_after_the_last_rename_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError("no space for the folder")

    monkeypatch.setattr(folders, "_sync", sync)
    with pytest.warns(UserWarning, match="is saved, but .* no space for the folder"):
        run_distributed(save, 2, tmp_path / "new", (2, "features"), 1)
    run_distributed(assert_loads, 2, tmp_path / "new", (2, "features"), 1)


def test_save_that_ends_between_renames_is_found(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    run_distributed(save, 2, target, (2, "features"), 1)
    target.rename(tmp_path / ".checkpoint.previous")
    assert folders.find(target) == tmp_path / ".checkpoint.previous"
    assert checkpoint.exists(target)
    run_distributed(assert_loads, 2, target, (2, "features"), 1)
    run_distributed(save, 2, target, (2, "features"), 2)
    run_distributed(assert_loads, 2, target, (2, "features"), 2)
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_what_killed_saves_left_is_not_read_and_goes(tmp_path: Path) -> None:
    """Not what other checkpoints beside it have left."""
    target, other = tmp_path / "checkpoint", f".checkpoint.saving.more.saving.{new_identity()}"
    run_distributed(save, 2, target, (2, "features"), 1)
    for name in (".checkpoint.saving", f".checkpoint.saving.{new_identity()}", other):
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).write_bytes(b"half")
    run_distributed(assert_loads, 2, target, (2, "features"), 1)
    run_distributed(save, 2, target, (2, "features"), 2)
    run_distributed(assert_loads, 2, target, (2, "features"), 2)
    assert sorted(os.listdir(tmp_path)) == [other, "checkpoint"]


def test_folder_that_one_rank_does_not_see_is_refused_on_every_rank(tmp_path: Path) -> None:
    def save_elsewhere(P_world: Partition) -> None:
        save(P_world, tmp_path / f"node {P_world.rank}" / "checkpoint", (2, "features"))

    with pytest.raises(CheckpointError, match=r"rank 1: .*does not exist: every rank must see the"):
        run_distributed(save_elsewhere, 2)


def name_another_folder(target: Path) -> None:
    metadata = read_pickled((target / METADATA).read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../other.distcp"
    (target / METADATA).write_bytes(pickle.dumps(metadata))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (lambda path: (path / "__1_0.distcp").write_bytes(b""), "__1_0.distcp belongs to no"),
    "folder": (name_another_folder, r"it names the file '\.\./other\.distcp'"),
    "nothing": (shutil.rmtree, "does not contain a checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_on_every_rank(tmp_path: Path, damage: str) -> None:
    target, (change, words) = tmp_path / "checkpoint", DAMAGES[damage]
    run_distributed(save, 2, target, (2, "features"))
    change(target)

    def check(P_world: Partition) -> None:
        with pytest.raises(CheckpointError, match=rf"loading .*checkpoint: rank \d: .*{words}"):
            checkpoint.load(distributed_model(P_world, 2, "features"), target)

    run_distributed(check, 2)


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(Exception, match="exists and is not a checkpoint"):
        run_distributed(save, 2, tmp_path, (2, "features"))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
