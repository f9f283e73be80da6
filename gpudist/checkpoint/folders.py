"""Write checkpoints atomically: to a folder next to the target, which is then renamed."""

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
    """Return the path of a checkpoint with symbolic links resolved.

    Raises:
        CheckpointError: the path has a character that no path can have.
    """
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} is not a path: {error}; give another one"
        ) from error


def prepare(target: Path) -> str:
    """Create an empty folder next to ``target``, and remove the files of interrupted saves.

    Returns:
        Identity of the save, which is part of the folder's name.

    Raises:
        CheckpointError: if ``target`` exists and is not a checkpoint.
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
    """Return the folder to which only this save writes, even if a rank of another save is late."""
    return target.with_name(f".{target.name}.saving.{identity}")


def put_in_place(target: Path, identity: str) -> str:
    """Rename the written folder to ``target``; the previous checkpoint is removed last.

    Returns:
        Text of a warning, if something failed once the new checkpoint was in place, or ``""``.
    """
    previous, written = _previous(target), writing_folder(target, identity)
    _sync(written)
    if target.exists():
        _remove(previous)
        os.rename(target, previous)
    try:
        os.rename(written, target)
    except OSError:
        # Another save has removed the folder, and perhaps put its own in place since then.
        with suppress(OSError):
            os.rename(previous, target)
        raise
    try:
        _sync(target.parent)
        _remove(previous)
    except OSError as error:
        return f"{target} is saved, but a power failure now may leave {previous} alone: {error}"
    return ""


def find(target: Path) -> Path:
    """Find the checkpoint at ``target``, or the one that an interrupted save would have replaced.

    Raises:
        CheckpointError: if there is none.
    """
    _require_end_of_links(target)
    # Another save may rename its folder to the target between the first two looks.
    for folder in (target, _previous(target), target):
        if (folder / METADATA).is_file():
            return folder
    raise CheckpointError(f"{target} does not contain a checkpoint: it has no {METADATA}")


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
    if not folder.is_dir():
        return False
    names = [entry.name for entry in folder.iterdir()]
    return not names or (
        METADATA in names and all(n == METADATA or n.endswith(".distcp") for n in names)
    )


def _sync(folder: Path) -> None:
    # Flush the folder's entries, so that they survive a power failure.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
