"""Reading torch's distributed checkpoints without running what they say."""

from __future__ import annotations

import io
import pickle
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

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
    """Torch's reader, which unpickles of the metadata only the classes that metadata has.

    Tensors are read as torch reads them: with ``weights_only=True``.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch.

        Raises:
            CheckpointError: the file is not metadata, or wants anything else made or called.
            OSError: it cannot be read.
        """
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata = read_pickled(file.read())
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{self.path}: its metadata is a {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            # A file elsewhere is none of the checkpoint's.
            if len(PurePosixPath(info.relative_path).parts) != 1 or info.relative_path == "..":
                raise CheckpointError(f"{self.path}: it names the file {info.relative_path!r}")
        for name, about in metadata.state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata) and not _is_whole(about):
                raise CheckpointError(
                    f"{self.path}: the parts of {name} do not make up its shape {list(about.size)}"
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _is_whole(about: TensorStorageMetadata) -> bool:
    """Whether the parts have as many cells as the tensor, all of them in it: torch's reader leaves
    out what is in no part."""
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
    """Torch's planner for a flat state dict, which loads values as torch loads weights."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_pickled(data: bytes) -> Any:
    """What was pickled, of the classes of metadata alone.

    Raises:
        CheckpointError: there is something else in it, or it is no pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise CheckpointError(f"the metadata cannot be read: {error}") from error


class _Unpickler(pickle._Unpickler):
    """The one in Python: that in C makes room for a number in the data, of any size."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout)):
            return value
        raise CheckpointError(f"the metadata refers to {module}.{name}; it may come from an attack")
