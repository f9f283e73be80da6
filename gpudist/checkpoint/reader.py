"""Read torch's distributed checkpoints without executing their contents."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import EnumMeta
from errno import ELOOP
from hashlib import blake2b
from math import prod
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import IO, Any
from weakref import finalize
from zipfile import ZipFile

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future
from torch.serialization import get_crc32_options

from gpudist.checkpoint.conversion import convert_dtype
from gpudist.checkpoint.identity import identity_of, require_identity
from gpudist.checkpoint.pickles import end_of
from gpudist.checkpoint.seal import unseal
from gpudist.checkpoint.texts import ReplacedError
from gpudist.errors import CheckpointError

METADATA = ".metadata"
_HELD = 32

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
    not verify, are verified. Every file is opened in the folder that had the path when the reader
    was created, must be a regular file, and must belong to the same save as the index.

    Args:
        path: folder of the checkpoint.

    Attributes:
        digest: number of the index that was read last, equal for equal bytes.
        is_sealed: whether that index had a checksum.

    Raises:
        ReplacedError: if the folder does not exist.
    """

    digest = 0
    is_sealed = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._identity: str | None = None
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ReplacedError(f"{path} does not exist") from error
        self._close_folder = finalize(self, os.close, self._folder)
        self._files: dict[str, IO[bytes]] = {}

    def close(self) -> None:
        """Close the folder and all held files."""
        while self._files:
            self._files.popitem()[1].close()
        self._close_folder()

    def hold(self, names: list[str]) -> None:
        """Keep files open until :meth:`close`, so that a save can remove them meanwhile.

        Args:
            names: names of the files; more than 32 are not kept open. Those that cannot be opened
                are left to :meth:`open_file`.
        """
        for name in names if len(names) <= _HELD else ():
            with suppress(CheckpointError, OSError):
                self._files[name] = self._open(name)

    def open_file(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file of the checkpoint for reading.

        Raises:
            ReplacedError: if it does not exist or belongs to another save.
            CheckpointError: unless it is a regular file.
        """
        return nullcontext(self._files[name]) if name in self._files else self._open(name)

    def _open(self, name: str) -> IO[bytes]:
        path = f"{self.path}/{name}"
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.fdopen(os.open(name, flags, dir_fd=self._folder), "rb")
        except FileNotFoundError as error:
            raise ReplacedError(
                f"{path} does not exist, but the checkpoint needs it; use another one, or copy all "
                "its files again"
            ) from error
        except OSError as error:
            if error.errno != ELOOP:
                raise
            raise _irregular(path, "symbolic link") from error
        try:
            if not S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _irregular(path, "FIFO, socket or device")
            if name != METADATA:
                require_identity(file, path, self._identity)
        except BaseException:
            file.close()
            raise
        return file

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint.

        Raises:
            ReplacedError: if the file does not exist.
            CheckpointError: if the file is not metadata, is damaged, or would create or call
                anything else.
            OSError: if the file cannot be read.
        """
        with self.open_file(METADATA) as file:
            data = file.read()
        self.digest = int.from_bytes(blake2b(data, digest_size=7).digest(), "little")
        try:
            data, self.is_sealed = unseal(data)
            metadata = read_pickled(data, is_alone=True)
            if not isinstance(metadata, Metadata):
                raise CheckpointError(
                    f"its metadata is a {type(metadata).__name__}; it must be torch's Metadata"
                )
            _require_sound(metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}/{METADATA}: {error}") from error
        self._identity = identity_of(metadata)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def require_of_one_save(self, names: Iterable[str]) -> None:
        """Raise for files that were not written by the same save as the index.

        Raises:
            ReplacedError: if a file is missing or belongs to another save; the error names it.
            CheckpointError: unless all are regular files.
        """
        for name in names:
            with self.open_file(name):
                pass

    def read_data(self, plan: LoadPlan, planner: SafePlanner) -> Future[None]:  # pyright: ignore
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.storage_index not in self.storage_data:
                raise CheckpointError(
                    f"{self.path}/{METADATA} names no file for {item.storage_index.fqn}; use "
                    "another checkpoint, or copy it again"
                )
            name = self.storage_data[item.storage_index].relative_path
            files.setdefault(name, []).append(item)
        for name, items in files.items():
            with self.open_file(name) as file:
                for item in items:
                    self._read_item(item, file, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, item: ReadItem, file: IO[bytes], planner: SafePlanner) -> None:
        name, info = item.dest_index.fqn, self.storage_data[item.storage_index]
        where = f"{self.path}/{info.relative_path}"
        _require_whole(_FileRange(file, info.offset, info.length), where)
        part: Any = _FileRange(file, info.offset, info.length)
        stream: Any = self.transforms.transform_load_stream(
            item, info.transform_descriptors or (), part
        )
        data = stream if stream.seekable() else io.BytesIO(stream.read(-1))
        try:
            loaded = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # The type of the error depends on the damage.
            raise CheckpointError(
                f"{where}: {name} cannot be read: {type(error).__name__}: {error}; save it again, "
                "or use another checkpoint"
            ) from error
        if item.type is LoadItemType.BYTE_IO:
            planner.load_value(item, loaded)
        else:
            planner.load_tensor(item, loaded, where)


def _irregular(path: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a {kind}; it must be a regular file: replace it by a copy of the file that "
        "the save wrote"
    )


def _require_sound(metadata: Metadata) -> None:
    """Raise if an index names other folders, or parts that do not form tensors."""
    for info in (metadata.storage_data or {}).values():
        # Files in other folders do not belong to the checkpoint.
        if len(PurePosixPath(info.relative_path).parts) != 1 or info.relative_path == "..":
            raise CheckpointError(
                f"it names the file {info.relative_path!r}; files must be in the checkpoint's "
                "folder"
            )
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata) and not _is_whole(about):
            raise CheckpointError(
                f"the parts of {name} do not make up its shape {list(about.size)}"
            )


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
    """Raise if data has changed since torch saved it, or would take for ever to load."""
    try:
        with ZipFile(part) as saved:  # pyright: ignore[reportArgumentType]
            # Torch does not compress files, and treats a file with attributes as a folder.
            odd = [
                each.filename
                for each in saved.filelist
                if each.file_size != each.compress_size or each.external_attr
            ]
            broken = odd[0] if odd else saved.testzip() if get_crc32_options() else None
            for name in saved.namelist() if broken is None else ():
                if name.endswith(".pkl"):
                    end_of(saved.read(name) if get_crc32_options() else _read_any(saved, name))
    except Exception as error:  # Data that is not an archive may raise any exception.
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointError(
            f"{path} is damaged: {broken} has another checksum (if it was saved without any, call "
            f"torch.serialization.set_crc32_options(False))"
        )


def _read_any(saved: ZipFile, name: str) -> bytes:
    with saved.open(name) as file:
        file._expected_crc = None  # pyright: ignore
        return file.read()


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
    """Torch's planner for a flat state dict, which converts tensors only as documented."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_value(self, item: ReadItem, value: Any) -> None:
        self.state_dict[item.dest_index.fqn] = value

    def load_tensor(self, item: ReadItem, part: Any, where: str) -> None:
        """Fill a part of a tensor from the stored ``part``.

        Raises:
            CheckpointError: if the part differs from its description in the index, or its values
                do not convert to the dtype of the tensor.
        """
        assert self.metadata is not None
        name, index = item.storage_index.fqn, item.storage_index
        about: Any = self.metadata.state_dict_metadata[name]
        chunk = about.chunks[index.index or 0]
        if chunk.offsets != index.offset:
            chunk = next(each for each in about.chunks if each.offsets == index.offset)
        stored = (part.dtype, part.shape) if isinstance(part, torch.Tensor) else type(part)
        if stored != (about.properties.dtype, chunk.sizes):
            raise CheckpointError(
                f"{where}: {name} has a part with {stored}, but the index says "
                f"{(about.properties.dtype, chunk.sizes)}; use another checkpoint, or copy it again"
            )
        cells = zip(item.storage_offsets, item.lengths, strict=True)
        part = part[tuple(slice(start, start + length) for start, length in cells)]
        target = self.resolve_tensor(item).detach()
        target.copy_(convert_dtype(part, target.dtype, name))
        self.commit_tensor(item, target)


def read_pickled(data: bytes, *, is_alone: bool = False) -> Any:
    """Unpickle data that consists only of the classes of metadata.

    Args:
        data: a pickle at the start.
        is_alone: whether ``data`` must end with the pickle.

    Raises:
        CheckpointError: if it contains anything else, or is not a pickle.
    """
    try:
        end = end_of(data)
        if is_alone and end != len(data):
            raise CheckpointError(
                f"it is damaged: it has {len(data)} bytes, of which it uses {end}"
            )
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # A pickle may raise any exception.
        raise CheckpointError(f"the metadata cannot be read: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Unpickler of data that :func:`end_of` has accepted: else it would allocate any size."""

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
