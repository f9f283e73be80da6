"""Read torch's distributed checkpoints without executing their contents."""

from __future__ import annotations

import io
import pickle
from enum import EnumMeta
from math import prod
from pathlib import Path, PurePosixPath
from typing import IO, Any
from zipfile import ZipFile

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import get_crc32_options

from gpudist.errors import CheckpointError

METADATA = ".metadata"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class SafeReader(FileSystemReader):
    """Torch's reader, which unpickles only the classes of metadata.

    Tensors are read with ``weights_only=True``, as in torch. Checksums, which torch writes but does
    not verify, are verified.
    """

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        if get_crc32_options():
            part = _FileRange(file, sinfo.offset, sinfo.length)
            _require_whole(part, f"{self.path}/{sinfo.relative_path}")
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint.

        Raises:
            CheckpointError: if the file is not metadata, or would create or call anything else.
            OSError: if the file cannot be read.
        """
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata = read_pickled(file.read())
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"{self.path}: its metadata is a {type(metadata).__name__}; it must be torch's "
                "Metadata"
            )
        for info in (metadata.storage_data or {}).values():
            # Files in other folders do not belong to the checkpoint.
            if len(PurePosixPath(info.relative_path).parts) != 1 or info.relative_path == "..":
                raise CheckpointError(
                    f"{self.path}: it names the file {info.relative_path!r}; files must be in the "
                    "checkpoint's folder"
                )
        for name, about in metadata.state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata) and not _is_whole(about):
                raise CheckpointError(
                    f"{self.path}: the parts of {name} do not make up its shape {list(about.size)}"
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _FileRange(io.RawIOBase):
    """Range of bytes of a file, with the interface of a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError(f"cannot seek to byte {origin + offset}; it must be at least 0")
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(left)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _require_whole(part: _FileRange, path: str) -> None:
    """Raise if data has changed since torch saved it."""
    try:
        with ZipFile(part) as saved:  # pyright: ignore[reportArgumentType]
            # Torch does not compress files, and treats a file with attributes as a folder.
            odd = [
                each.filename
                for each in saved.filelist
                if each.file_size != each.compress_size or each.external_attr
            ]
            broken = odd[0] if odd else saved.testzip()
    except Exception as error:  # Data that is not an archive may raise any exception.
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointError(
            f"{path} is damaged: {broken} has another checksum (if it was saved without any, call "
            f"torch.serialization.set_crc32_options(False))"
        )


def _is_whole(about: TensorStorageMetadata) -> bool:
    """Return whether the parts cover the tensor: all lie inside, and their cells add up.

    Torch's reader silently skips cells that no part contains.
    """
    cells = 0
    for chunk in about.chunks:
        dims = list(zip(chunk.offsets, chunk.sizes, about.size, strict=True))
        if any(offset < 0 or size < 0 or offset + size > n for offset, size, n in dims):
            return False
        cells += prod(chunk.sizes)
    starts = {tuple(chunk.offsets) for chunk in about.chunks if prod(chunk.sizes)}
    full = sum(1 for chunk in about.chunks if prod(chunk.sizes))
    return cells == prod(about.size) and len(starts) == full


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner for a flat state dict, which loads values with ``weights_only=True``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_pickled(data: bytes) -> Any:
    """Unpickle data that consists only of the classes of metadata.

    Raises:
        CheckpointError: if it contains anything else, or is not a pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # A pickle may raise any exception.
        raise CheckpointError(f"the metadata cannot be read: {error}") from error


class _Unpickler(pickle._Unpickler):
    """Python's unpickler; the C version would allocate any size that the data requests."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout)):
            return value
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise CheckpointError(f"the metadata refers to {module}.{name}; it may come from an attack")


def _enum_member(kind: Any, name: str) -> Any:
    # Python 3.11.0 to 3.11.3 pickles a member of an enumeration as a call of getattr.
    if not isinstance(kind, EnumMeta):
        raise CheckpointError(f"the metadata takes {name} of {kind}; it may come from an attack")
    return kind[name]
