"""Checkpoints in the format of ``torch.distributed.checkpoint``, written by all ranks together."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from gpudist.checkpoint import folders
from gpudist.checkpoint.identity import files_of, first_bytes, require_of_one_save
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
from gpudist.checkpoint.texts import broadcast_text, failing_together, gather_at_first
from gpudist.checks.arguments import checked
from gpudist.errors import CheckpointError
from gpudist.world.partition import Partition


@checked(CheckpointError)
def save(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write a checkpoint that every layout on any number of ranks can load, also plain torch.

    Collective over the world; every rank sees the folder. It appears under its name only when it is
    whole: until then, and if the save ends in between, :func:`load` finds the one before. Each save
    writes to a folder of its own and marks its files, so that a rank that stopped and wakes when
    another job saves there changes nothing of the other's; two saves at once end in one of them.
    ``torch.distributed.checkpoint.load`` finds in it ``{"model": ..., "optimizer": {"state": ...,
    "param_groups": ...}}``, state by the names of parameters; torch needs no process group here.

    Args:
        module: a tree of layers, distributed or not, the same on every rank.
        path: of a folder, new or of the checkpoint to replace. A symbolic link stays: what it leads
            to is replaced, or made if it is not there.
        optimizer: of the module's parameters, to be written too.

    Cost:
        Every rank writes its blocks to a file of its own; of copies the first is written. Rank 0
        gathers about 500 bytes for each block, writes the index and opens every file once.

    Raises:
        CheckpointError: on every rank, if one cannot write, or does not see the folder, or the
            ranks' models differ.
    """
    P_world, target = world_of(module), folders.place_of(path)
    state: dict[str, Any] = {"model": model_to_save(module, P_world)}
    if optimizer is not None:
        state["optimizer"] = optimizer_to_save(module, optimizer, P_world)
    what = f"saving {target}"
    identity: str | None = None
    try:
        with failing_together(P_world, what):
            if P_world.rank == 0:
                identity = folders.prepare(target)
        identity = broadcast_text(P_world, identity, 0)
        planner, folder = DefaultSavePlanner(), folders.writing_folder(target, identity)
        writer = _Writer(folder, identity)
        with failing_together(P_world, what):
            written = _write(state, planner, writer, P_world)
        all_written = [pickle.loads(data) for data in gather_at_first(P_world, written)]
        with failing_together(P_world, what):
            if P_world.rank == 0:
                _, metadata = planner.create_global_plan([plan for plan, _ in all_written])
                writer.finish(metadata, [results for _, results in all_written])
                # Not every torch completes the object that it is given.
                metadata = SafeReader(folder).read_metadata()
                require_of_one_save(folder, files_of(metadata), metadata)
                folders.put_in_place(target, identity)
    except BaseException:
        if P_world.rank == 0 and identity is not None:
            shutil.rmtree(folders.writing_folder(target, identity), ignore_errors=True)
        raise


class _Writer(FileSystemWriter):
    """Torch's writer, into a folder that is there, whose files begin with the save's identity."""

    def __init__(self, folder: Path, identity: str) -> None:
        super().__init__(folder)
        self.save_id = identity
        self.fs = _MarkedFiles(first_bytes(identity))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Torch's makes the folder: again, if another save has removed it.
        if not Path(self.path).is_dir():
            raise CheckpointError(
                f"{self.path}, which rank 0 has made, is not there: every rank must see the same "
                "folder, and one save at a time may write to the path"
            )
        return plan

    def storage_meta(self) -> StorageMeta:
        # Torch's has the path, which is another when the checkpoint is whole.
        return StorageMeta(save_id=self.save_id)


class _MarkedFiles(FileSystem):
    def __init__(self, mark: bytes) -> None:
        self._mark = mark

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:
        with super().create_stream(path, mode) as stream:
            if Path(path).suffix == ".distcp":
                stream.write(self._mark)
            yield stream  # pyright: ignore[reportReturnType]


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
        that was written, twice: its checksum is compared first. Each file is opened once more, by
        one rank, for its identity.

    Raises:
        CheckpointError: on every rank, before anything changes, if a file is of another save than
            the index, a name is missing or unknown, a shape is another, or the optimizer has other
            groups or does not take the state; later, with the optimizer as it was but tensors of
            the module filled, if a file cannot be read or is damaged.
    """
    P_world, target = world_of(module), folders.place_of(path)
    what = f"loading {target}"
    with failing_together(P_world, what):
        folder = folders.find(target)
        reader = SafeReader(folder)
        metadata = reader.read_metadata()
        require_of_one_save(folder, files_of(metadata)[P_world.rank :: P_world.size], metadata)
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
        folders.find(folders.place_of(path))
    except CheckpointError:
        return False
    return True


def _read(state: dict[str, Any], reader: SafeReader, metadata: Metadata) -> None:
    planner = SafePlanner()
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
