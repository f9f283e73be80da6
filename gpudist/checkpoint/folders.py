"""A checkpoint appears as a whole: it is written beside its place, then put there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gpudist.checkpoint.reader import METADATA
from gpudist.errors import CheckpointError


def prepare(target: Path) -> Path:
    """A new empty folder beside ``target`` to write to; what an interrupted save left is removed.

    Raises:
        CheckpointError: there is something at ``target`` that is not a checkpoint alone.
    """
    if target.exists() and not _is_checkpoint(target):
        raise CheckpointError(f"{target} exists and is not a checkpoint; give another path")
    partial = writing_folder(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def writing_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.saving")


def put_in_place(target: Path) -> None:
    """Make the folder that was written the checkpoint; what was there before is removed last."""
    previous = _previous(target)
    _sync(writing_folder(target))
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(writing_folder(target), target)
    _sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def find(target: Path) -> Path:
    """The checkpoint at ``target``, or the one that a save was about to replace when it ended.

    Raises:
        CheckpointError: there is none.
    """
    for folder in (target, _previous(target)):
        if (folder / METADATA).is_file():
            return folder
    raise CheckpointError(f"there is no checkpoint at {target}: it has no {METADATA}")


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _is_checkpoint(folder: Path) -> bool:
    """It has nothing but the files of one, or nothing at all."""
    if not folder.is_dir():
        return False
    names = [entry.name for entry in folder.iterdir()]
    return not names or (
        METADATA in names and all(n == METADATA or n.endswith(".distcp") for n in names)
    )


def _sync(folder: Path) -> None:
    """Make the names in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
