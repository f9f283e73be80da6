"""Checkpoints in the format of ``torch.distributed.checkpoint``, written by all ranks together."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from gpudist.arguments import checked
from gpudist.checkpoint import folders
from gpudist.checkpoint.optimizer_state import unchanged_by_failure
from gpudist.checkpoint.reader import SafePlanner, SafeReader
from gpudist.checkpoint.sequential import world_of
from gpudist.checkpoint.stored import (
    model_to_load,
    model_to_save,
    optimizer_to_load,
    optimizer_to_save,
    require_same_groups,
    set_optimizer,
)
from gpudist.checkpoint.texts import failing_together, gather_at_first
from gpudist.errors import CheckpointError
from gpudist.partition import Partition


@checked(CheckpointError)
def save(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write a checkpoint that every layout on any number of ranks can load, also plain torch.

    Collective over the world; every rank sees the folder. It appears under its name only when it is
    whole: until then, and if the save ends in between, :func:`load` finds the one before.
    ``torch.distributed.checkpoint.load`` finds in it ``{"model": ..., "optimizer": {"state": ...,
    "param_groups": ...}}``, state by the names of parameters; torch needs no process group here.

    Args:
        module: a tree of layers, distributed or not, the same on every rank.
        path: of a folder, new or of the checkpoint to replace.
        optimizer: of the module's parameters, to be written too.

    Cost:
        Every rank writes its blocks to a file of its own; of copies the first is written. Rank 0
        gathers about 500 bytes for each block and writes the index.

    Raises:
        CheckpointError: on every rank, if one cannot write, or the ranks' models differ.
    """
    P_world, target = world_of(module), Path(path).absolute()
    state: dict[str, Any] = {"model": model_to_save(module, P_world)}
    if optimizer is not None:
        state["optimizer"] = optimizer_to_save(module, optimizer, P_world)
    what = f"saving {target}"
    try:
        with failing_together(P_world, what):
            if P_world.rank == 0:
                folders.prepare(target)
        planner = DefaultSavePlanner()
        writer = _Writer(folders.writing_folder(target))
        with failing_together(P_world, what):
            written = _write(state, planner, writer, P_world)
        all_written = [pickle.loads(data) for data in gather_at_first(P_world, written)]
        with failing_together(P_world, what):
            if P_world.rank == 0:
                _, metadata = planner.create_global_plan([plan for plan, _ in all_written])
                writer.finish(metadata, [results for _, results in all_written])
                folders.put_in_place(target)
    except BaseException:
        if P_world.rank == 0:
            shutil.rmtree(folders.writing_folder(target), ignore_errors=True)
        raise


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # Torch's has the path, which is another when the checkpoint is whole.
        return StorageMeta(save_id=self.save_id)


def _write(
    state: dict[str, Any], planner: DefaultSavePlanner, writer: _Writer, P: Partition
) -> bytes:
    """Write what is this rank's; returns what rank 0 needs for the index."""
    assert P.rank is not None
    planner.set_up_planner(state, is_coordinator=P.rank == 0)
    writer.set_up_storage_writer(P.rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The names of files follow from the rank.
    plan = writer.prepare_global_plan([plan] * P.size)[P.rank]
    results = writer.write_data(plan, planner).wait()
    return pickle.dumps((replace(plan, storage_data=None), results))


@checked(CheckpointError)
def load(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read a checkpoint, whatever layout and number of ranks wrote it.

    Collective over the world; every rank sees the folder. Executes nothing that is in it: of the
    index only known classes are made, and tensors and values are read as ``torch.load`` does with
    ``weights_only=True``. One by plain torch will do, with the same names, ``"model"`` before them.

    Args:
        module: filled in place; a tree of layers, distributed or not, the same on every rank.
        path: of the folder.
        optimizer: of the module's parameters, in the same groups; to be filled too.

    Cost:
        Every rank reads the parts of the files that its blocks are in; of a part, all of the block
        that was written, twice: its checksum is compared first.

    Raises:
        CheckpointError: on every rank, before anything changes, if a name is missing or unknown, a
            shape is another, or the optimizer has other groups or does not take the state; later,
            with the optimizer as it was but tensors of the module filled, if a file cannot be read
            or is damaged.
    """
    P_world, target = world_of(module), Path(path).absolute()
    what = f"loading {target}"
    with failing_together(P_world, what):
        reader = SafeReader(folders.find(target))
        metadata = reader.read_metadata()
        state = model_to_load(module, metadata, P_world)
        values, tensors = {}, {}
        if optimizer is not None:
            values, tensors = optimizer_to_load(module, optimizer, metadata)
            _read(values, reader, metadata)
            require_same_groups(module, optimizer, metadata, values)
    with unchanged_by_failure(optimizer):
        with failing_together(P_world, what):
            if optimizer is not None:
                _read(tensors, reader, metadata)
                set_optimizer(module, optimizer, metadata, values | tensors)
        # Last: the module's tensors are filled in place.
        with failing_together(P_world, what):
            _read(state, reader, metadata)


@checked(CheckpointError)
def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint for :func:`load`, as this rank sees the folder.

    Not collective. A save that ended at any moment does not change the answer from true to false.
    """
    try:
        folders.find(Path(path).absolute())
    except CheckpointError:
        return False
    return True


def _read(state: dict[str, Any], reader: SafeReader, metadata: Metadata) -> None:
    planner = SafePlanner()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
