"""Identity of a save, found in its index and in the first bytes of each of its files."""

from __future__ import annotations

import re
import secrets
from typing import IO

from torch.distributed.checkpoint.metadata import Metadata

from gpudist.checkpoint.texts import ReplacedError

_IDENTITY = re.compile(r"gpudist-[0-9a-f]{32}")


def new_identity() -> str:
    return f"gpudist-{secrets.token_hex(16)}"


def first_bytes(identity: str) -> bytes:
    """Return the first bytes of each file of a save, which readers skip by offsets in the index."""
    return f"{identity}\n".encode()


def identity_of(metadata: Metadata) -> str | None:
    """Return the identity of the save that wrote an index; ``None`` if it has no identity."""
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return save_id if isinstance(save_id, str) and _IDENTITY.fullmatch(save_id) else None


def files_of(metadata: Metadata) -> list[str]:
    """Return the sorted names of the files to which an index refers."""
    return sorted({info.relative_path for info in (metadata.storage_data or {}).values()})


def require_identity(file: IO[bytes], path: str, identity: str | None) -> None:
    """Raise if an open file was not written by the same save as the index.

    Args:
        file: the file at its start.
        path: name of the file for errors.
        identity: identity of the save in the index; ``None`` accepts every file.

    Raises:
        ReplacedError: if the file belongs to another save.
    """
    if identity is None:
        return
    expected = first_bytes(identity)
    start = file.read(len(expected))
    if start != expected:
        other_id = start.decode("ascii", errors="replace").strip()
        other = f"save {other_id}" if _IDENTITY.fullmatch(other_id) else "no save that it names"
        raise ReplacedError(
            f"{path} belongs to {other}, but the index to save {identity}: the "
            "checkpoint is a mixture; use another one, or copy all its files again"
        )
