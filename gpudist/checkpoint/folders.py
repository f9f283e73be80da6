"""A checkpoint appears as a whole: it is written beside its place, then put there."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gpudist.checkpoint.identity import new_identity
from gpudist.checkpoint.reader import METADATA
from gpudist.errors import CheckpointError


def place_of(path: str | os.PathLike[str]) -> Path:
    """Where the checkpoint of that name lies, or will: at the end of symbolic links."""
    return Path(os.path.realpath(path))


def prepare(target: Path) -> str:
    """Make an empty folder beside ``target`` to write to; what interrupted saves left is removed.

    Returns:
        The identity of the save, which the folder has in its name.

    Raises:
        CheckpointError: there is something at ``target`` that is not a checkpoint alone.
    """
    _require_end_of_links(target)
    if target.exists() and not _is_checkpoint(target):
        raise CheckpointError(f"{target} exists and is not a checkpoint; give another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    left = re.compile(re.escape(f".{target.name}.saving") + r"(\.gpudist-[0-9a-f]+)?")
    for entry in list(target.parent.iterdir()):
        if left.fullmatch(entry.name):
            _remove(entry)
    identity = new_identity()
    writing_folder(target, identity).mkdir()
    return identity


def writing_folder(target: Path, identity: str) -> Path:
    """The folder that one save alone writes to: a rank of another that wakes late has its own."""
    return target.with_name(f".{target.name}.saving.{identity}")


def put_in_place(target: Path, identity: str) -> None:
    """Make the folder that was written the checkpoint; what was there before is removed last."""
    previous, written = _previous(target), writing_folder(target, identity)
    _sync(written)
    if target.exists():
        _remove(previous)
        os.rename(target, previous)
    try:
        os.rename(written, target)
    except OSError:
        # Another save has removed the folder, and perhaps put its own in place meanwhile.
        with suppress(OSError):
            os.rename(previous, target)
        raise
    _sync(target.parent)
    _remove(previous)


def find(target: Path) -> Path:
    """The checkpoint at ``target``, or the one that a save was about to replace when it ended.

    Raises:
        CheckpointError: there is none.
    """
    _require_end_of_links(target)
    for folder in (target, _previous(target)):
        if (folder / METADATA).is_file():
            return folder
    raise CheckpointError(f"there is no checkpoint at {target}: it has no {METADATA}")


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _require_end_of_links(target: Path) -> None:
    if target.is_symlink():
        raise CheckpointError(
            f"{target} is a symbolic link that leads to itself; give another path"
        )


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
