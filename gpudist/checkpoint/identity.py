"""Identity of a save, found in its index and in the first bytes of each of its files."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from gpudist.errors import CheckpointError

_IDENTITY = re.compile(r"gpudist-[0-9a-f]{32}")


def new_identity() -> str:
    return f"gpudist-{secrets.token_hex(16)}"


def first_bytes(identity: str) -> bytes:
    """First bytes of each file of the save, which readers skip by the offsets in the index."""
    return f"{identity}\n".encode()


def identity_of(metadata: Metadata) -> str | None:
    """Identity of the save that wrote an index; ``None`` for plain torch or earlier versions."""
    found = getattr(metadata.storage_meta, "save_id", None)
    return found if isinstance(found, str) and _IDENTITY.fullmatch(found) else None


def files_of(metadata: Metadata) -> list[str]:
    """Sorted names of the files that an index refers to."""
    return sorted({info.relative_path for info in (metadata.storage_data or {}).values()})


def require_of_one_save(folder: Path, files: Iterable[str], metadata: Metadata) -> None:
    """Refuse files that were not written by the same save as the index.

    Raises:
        CheckpointError: if a file belongs to another save; the error names the file.
        OSError: if a file cannot be read.
    """
    identity = identity_of(metadata)
    if identity is None:
        return
    expected = first_bytes(identity)
    for name in files:
        with open(folder / name, "rb") as file:
            found = file.read(len(expected))
        if found != expected:
            other_id = found.decode("ascii", errors="replace").strip()
            other = f"save {other_id}" if _IDENTITY.fullmatch(other_id) else "no save that it names"
            raise CheckpointError(
                f"{folder / name} is of {other}, the index of save {identity}: the checkpoint is a "
                "mixture; take another one, or copy all its files again"
            )
