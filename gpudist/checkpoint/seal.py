"""Checksum at the end of an index, after the pickle that torch reads."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from gpudist.errors import CheckpointError

_MARK = b"\ngpudist-index blake2b "
_LENGTH = len(_MARK) + 33


def _seal_of(index: bytes) -> bytes:
    return _MARK + blake2b(index, digest_size=16).hexdigest().encode() + b"\n"


def seal(path: Path) -> None:
    """Append the checksum to a written index."""
    with open(path, "r+b") as file:
        file.write(_seal_of(file.read()))
        file.flush()
        os.fsync(file.fileno())


def unseal(data: bytes) -> tuple[bytes, bool]:
    """Return an index without its checksum, and whether it had one.

    Raises:
        CheckpointError: if the checksum differs from that of the bytes before it.
    """
    index, end = data[:-_LENGTH], data[-_LENGTH:]
    if end == _seal_of(index):
        return index, True
    if end.startswith(_MARK):
        raise CheckpointError(
            "the index is damaged: its bytes do not have the checksum at its end; use another "
            "checkpoint, or copy it again"
        )
    return data, False
