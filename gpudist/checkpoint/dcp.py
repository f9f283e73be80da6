"""Checkpoints in the format of ``torch.distributed.checkpoint``, written by all ranks together."""

from __future__ import annotations

import os
import pickle
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from gpudist.checkpoint import folders
from gpudist.checkpoint.contents import (
    NOTES,
    may_convert,
    migrate,
    model_to_load,
    model_to_save,
    notes_to_save,
    optimizer_to_load,
    optimizer_to_save,
    require_same_groups,
    set_optimizer,
    use_draws,
    whole_model_to_read,
)
from gpudist.checkpoint.copies import warn_of_differences
from gpudist.checkpoint.extra_state import (
    assemble_model,
    extra_to_load,
    give_extra,
)
from gpudist.checkpoint.identity import files_of, first_bytes, identity_of
from gpudist.checkpoint.json_values import text_of_values
from gpudist.checkpoint.nested import Entire, NestedPlanner
from gpudist.checkpoint.optimizer_state import restore_on_failure
from gpudist.checkpoint.reader import METADATA, SafePlanner, SafeReader
from gpudist.checkpoint.seal import seal
from gpudist.checkpoint.sequential import world_of
from gpudist.checkpoint.texts import ReplacedError, broadcast_text, failing_together
from gpudist.checks.arguments import checked
from gpudist.errors import CheckpointError
from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts_on_first


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

    Writes one of equal copies of a parameter or buffer. If the copies differ, in a converted
    network or with ``replicate_parameters=True``, rank 0 warns, and one is written nevertheless. It
    also warns if something fails once the new checkpoint is in place.

    Args:
        module: tree of layers, distributed or not, the same on every rank.
        path: folder to create, or checkpoint to replace. A symbolic link is kept: its target is
            replaced, or created if it does not exist.
        optimizer: optimizer of the module's parameters to save with it.

    Cost:
        Every rank writes its blocks to its own file; only the first copy of a block is written.
        Rank 0 gathers about 500 bytes for each block, writes the index, opens every file once, and
        reads back the index and the values that are not tensors. Each rank reads its copies of
        replicated tensors once more, and gathers 8 bytes per copy.

    Raises:
        CheckpointError: on every rank, and the previous checkpoint stays, if a rank cannot write or
            does not see the folder, the ranks' models or their extra state differ, or a value could
            not be loaded: an object of any other class than numbers, texts and containers in a
            group of the optimizer, its state or a module's extra state, an expanded buffer, or an
            entry of the state dict beside parameters, buffers and extra state.
    """
    P_world, target = world_of(module), folders.place_of(path)
    state: dict[str, Any] = {"model": model_to_save(module, P_world)}
    with failing_together(P_world, "saving the model"):
        state |= {NOTES: notes_to_save(module)} if P_world.rank == 0 else {}
    if optimizer is not None:
        state["optimizer"] = optimizer_to_save(module, optimizer, P_world)
    what = f"saving {target}"
    identity: str | None = None
    warning = ""
    try:
        with failing_together(P_world, what):
            if P_world.rank == 0:
                identity = folders.prepare(target)
        identity = broadcast_text(P_world, identity, 0)
        planner, folder = NestedPlanner(), folders.writing_folder(target, identity)
        writer = _Writer(folder, identity)
        with failing_together(P_world, what):
            written = _write(state, planner, writer, P_world)
        all_written = [pickle.loads(data) for data in gather_texts_on_first(P_world, written)]
        with failing_together(P_world, what):
            if P_world.rank == 0:
                _, metadata = planner.create_global_plan([plan for plan, _ in all_written])
                writer.finish(metadata, [results for _, results in all_written])
                seal(folder / METADATA)
                with closing(SafeReader(folder)) as reader:
                    _require_readable(reader, planner.state_dict)
                warning = folders.put_in_place(target, identity)
    except BaseException:
        if P_world.rank == 0 and identity is not None:
            shutil.rmtree(folders.writing_folder(target, identity), ignore_errors=True)
        raise
    # Last, because a filter may turn the warnings into errors.
    warn_of_differences(f"saved {target}", module, module.state_dict().keys(), P_world)
    if warning:
        warnings.warn(warning, stacklevel=3)


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


def _write(state: dict[str, Any], planner: NestedPlanner, writer: _Writer, P: Partition) -> bytes:
    """Write this rank's part; return the information that rank 0 needs for the index."""
    assert P.rank is not None
    planner.set_up_planner(state, is_coordinator=P.rank == 0)
    writer.set_up_storage_writer(P.rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The rank determines the names of its files.
    plan = writer.prepare_global_plan([plan] * P.size)[P.rank]
    results = writer.write_data(plan, planner).wait()
    return pickle.dumps((replace(plan, storage_data=None), results))


def _require_readable(reader: SafeReader, written: dict[str, Any]) -> None:
    """Raise unless :func:`load` would accept the index and read the values of rank 0 as they are.

    Args:
        reader: reader of the written folder.
        written: rank 0's state dict, by names in the index.
    """
    metadata = reader.read_metadata()
    reader.require_of_one_save(files_of(metadata))
    values = {
        name: None
        for name, about in metadata.state_dict_metadata.items()
        if not isinstance(about, TensorStorageMetadata)
    }
    _read(values, reader, metadata)
    for name, value in values.items():
        saved = written[name].value if isinstance(written[name], Entire) else written[name]
        if text_of_values({name: value}) != text_of_values({name: saved}):
            raise CheckpointError(
                f"{name} is {saved!r:.200} but reads back as {value!r:.200}; convert it to "
                "numbers, texts or lists of them"
            )


# Attempts to read one checkpoint while other jobs replace it, and the pause before each but one.
_ATTEMPTS = 20
_PAUSE_S = 0.02


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

    All ranks load the same save, also while another job saves to ``path``: if a rank finds files of
    another save than the index, all ranks begin again with the new one.

    Modules convert older versions by their own ``_load_from_state_dict`` and hooks. A checkpoint of
    plain torch has no versions, so it counts as of the first one. Tensors are converted to the
    module's dtypes. Floating-point numbers are rounded; integers and booleans keep their value.
    Modules get their extra state last. Converted networks draw the same random numbers as if they
    had continued after the save.

    Args:
        module: tree of layers to fill in place, distributed or not, the same on every rank.
        path: folder of the checkpoint.
        optimizer: optimizer of the module's parameters, in the same groups, to fill with it.

    Cost:
        Every rank reads those parts of the files that overlap its blocks. Each part is a full block
        as written, and is read twice, because its checksum is verified first. In addition, one rank
        opens each file for its identity. If modules may convert values, or parameters are DTensors,
        rank 0 reads the whole model and sends it as :func:`load_full_state_dict` does.

    Raises:
        CheckpointError: on every rank, before anything changes, if a file belongs to another save
            than the index, the index is damaged, a name is missing or unknown, a shape differs, a
            dtype does not convert (complex to real, floating-point to integer), or the optimizer
            has other groups or rejects the state. Later, with an unchanged optimizer but some of
            the module's tensors filled, if a file cannot be read or is damaged, a number exceeds
            the range of the module's dtype, a module rejects its extra state, or other jobs have
            replaced the checkpoint 20 times during the load.
    """
    P_world, target = world_of(module), folders.place_of(path)
    what = f"loading {target}"
    before: list[int] = []
    failure: ReplacedError | None = None
    for attempt in range(_ATTEMPTS):
        time.sleep(_PAUSE_S * (attempt > 0))
        try:
            with ExitStack() as opened:
                with failing_together(P_world, what):
                    reader = opened.enter_context(closing(SafeReader(folders.find(target))))
                    metadata = reader.read_metadata()
                digests = [row[0] for row in P_world.allgather_data([reader.digest])]
                if digests == before:
                    # Nobody has replaced the index since the last attempt.
                    break
                before = digests
                if other := next((r for r, each in enumerate(digests) if each != digests[0]), 0):
                    raise ReplacedError(
                        f"{what}: rank {other} sees another checkpoint than rank 0; every rank "
                        "must see the same folder"
                    )
                return _load(module, optimizer, P_world, what, reader, metadata)
        except ReplacedError as error:
            failure = error
    else:
        raise CheckpointError(
            f"{what}: other jobs have replaced the checkpoint {_ATTEMPTS} times during the load; "
            "save less often, or load from a path to which nobody saves"
        ) from failure
    raise CheckpointError(str(failure)) from failure


def _load(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    P_world: Partition,
    what: str,
    reader: SafeReader,
    metadata: Metadata,
) -> None:
    """Load from an open checkpoint, the same on every rank. Collective.

    Raises:
        ReplacedError: on every rank, if another job has replaced it.
        CheckpointError: on every rank, as :func:`load`.
    """
    with failing_together(P_world, what):
        if P_world.rank == 0 and not reader.is_sealed and identity_of(metadata) is not None:
            warnings.warn(
                f"{reader.path} was saved by an earlier version of gpudist, and its index has no "
                "checksum: damage to it may be found late or never; save it again",
                stacklevel=4,
            )
        converts = may_convert(module, metadata)
    # Ranks may have other hooks.
    migrating = any(number for (number,) in P_world.allgather_data([int(converts)]))
    with failing_together(P_world, what):
        reader.hold(files_of(metadata))
        reader.require_of_one_save(files_of(metadata)[P_world.rank :: P_world.size])
        if not migrating:
            state = model_to_load(module, metadata)
        else:
            state = whole_model_to_read(metadata) if P_world.rank == 0 else {}
        values = extra = extra_to_load(module, metadata)
        tensors: dict[str, Any] = {}
        if optimizer is not None:
            of_optimizer, tensors = optimizer_to_load(module, optimizer, metadata)
            values = values | of_optimizer
        values = values | dict.fromkeys({NOTES} & metadata.state_dict_metadata.keys())
        _read(values, reader, metadata)
        if optimizer is not None:
            require_same_groups(module, optimizer, metadata, values)
    with restore_on_failure(optimizer):
        with failing_together(P_world, what):
            if optimizer is not None:
                _read(tensors, reader, metadata)
                set_optimizer(module, optimizer, metadata, values | tensors)
        # Read tensors last, because the module's tensors are filled in place.
        with failing_together(P_world, what):
            _read(state, reader, metadata)
        if migrating:
            migrate(module, metadata, state, values.get(NOTES))
        with failing_together(P_world, what):
            use_draws(module, values.get(NOTES))
            if not migrating:
                give_extra(module, assemble_model(metadata, {name: values[name] for name in extra}))


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
