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
from gpudist.checkpoint.texts import broadcast_text, failing_together
from gpudist.checks.arguments import checked
from gpudist.errors import CheckpointError
from gpudist.world.partition import Partition
from gpudist.world.texts import collected


@checked(CheckpointError)
def save(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write a checkpoint that any layout on any number of ranks, and plain torch, can load.

    Collective over the world; every rank must see the folder. The folder appears under its name
    only when it is complete. Until then, and after an interrupted save, :func:`load` finds the
    previous checkpoint. Each save writes to its own folder and marks its files, so that a stalled
    rank of an earlier job cannot modify the checkpoint of another job. After two simultaneous
    saves, the checkpoint of one of them remains. ``torch.distributed.checkpoint.load`` finds
    ``{"model": ..., "optimizer": {"state": ..., "param_groups": ...}}`` in it, with state by
    parameter name, and without a process group.

    Args:
        module: tree of layers, distributed or not, the same on every rank.
        path: folder to create, or checkpoint to replace. A symbolic link is kept: its target is
            replaced, or created if it does not exist.
        optimizer: optimizer of the module's parameters to save with it.

    Cost:
        Every rank writes its blocks to its own file; only the first copy of a block is written.
        Rank 0 gathers about 500 bytes for each block, writes the index and opens every file once.

    Raises:
        CheckpointError: on every rank, if a rank cannot write or does not see the folder, or the
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
        all_written = [pickle.loads(data) for data in collected(P_world, written)]
        with failing_together(P_world, what):
            if P_world.rank == 0:
                _, metadata = planner.create_global_plan([plan for plan, _ in all_written])
                writer.finish(metadata, [results for _, results in all_written])
                # Some versions of torch do not complete the object passed to them.
                metadata = SafeReader(folder).read_metadata()
                require_of_one_save(folder, files_of(metadata), metadata)
                folders.put_in_place(target, identity)
    except BaseException:
        if P_world.rank == 0 and identity is not None:
            shutil.rmtree(folders.writing_folder(target, identity), ignore_errors=True)
        raise


class _Writer(FileSystemWriter):
    """Torch's writer for an existing folder; its files begin with the identity of the save."""

    def __init__(self, folder: Path, identity: str) -> None:
        super().__init__(folder)
        self.save_id = identity
        self.fs = _MarkedFiles(first_bytes(identity))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # Torch's method would create the folder again if another save has removed it.
        if not Path(self.path).is_dir():
            raise CheckpointError(
                f"{self.path}, which rank 0 has created, does not exist: every rank must see the "
                "same folder, and only one save at a time may write to the path"
            )
        return plan

    def storage_meta(self) -> StorageMeta:
        # Torch's method stores the path, which changes when the checkpoint is complete.
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
    """Write this rank's part; return the information that rank 0 needs for the index."""
    assert P.rank is not None
    planner.set_up_planner(state, is_coordinator=P.rank == 0)
    writer.set_up_storage_writer(P.rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The rank determines the names of its files.
    plan = writer.prepare_global_plan([plan] * P.size)[P.rank]
    results = writer.write_data(plan, planner).wait()
    return pickle.dumps((replace(plan, storage_data=None), results))


@checked(CheckpointError)
def load(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Load a checkpoint that any layout on any number of ranks has written.

    Collective over the world; every rank must see the folder. Nothing in the checkpoint is
    executed: only known classes in the index are unpickled, and tensors and values are read as by
    ``torch.load`` with ``weights_only=True``. Checkpoints by plain torch can be loaded if names are
    equal and begin with ``"model"``.

    Args:
        module: tree of layers to fill in place, distributed or not, the same on every rank.
        path: folder of the checkpoint.
        optimizer: optimizer of the module's parameters, in the same groups, to fill with it.

    Cost:
        Every rank reads those parts of the files that overlap its blocks. Each part is a full block
        as written, and is read twice, because its checksum is verified first. In addition, one rank
        opens each file for its identity.

    Raises:
        CheckpointError: on every rank, before anything changes, if a file belongs to another save
            than the index, a name is missing or unknown, a shape differs, or the optimizer has
            other groups or rejects the state. Later, with an unchanged optimizer but some of the
            module's tensors filled, if a file cannot be read or is damaged.
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
        # Read tensors last, because the module's tensors are filled in place.
        with failing_together(P_world, what):
            _read(state, reader, metadata)


@checked(CheckpointError)
def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether :func:`load` would find a checkpoint at ``path``.

    Not collective: the result refers to the folder as seen by this rank. An interrupted save never
    changes it from true to false.

    Args:
        path: folder of the checkpoint, as for :func:`load`.

    Returns:
        True if there is a checkpoint to load.
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
