"""Structure of a batch, in a compact binary format that describes only data.

A schema is a tree in prefix order. Each node consists of a byte for its kind, the information for
rebuilding a container, and its children. Values and shapes, which change at every step, are not
part of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from gpudist.batch.leaves import (
    BYTES,
    DTYPE_NUMBERS,
    DTYPES,
    MAX_DIMS,
    NONE,
    PLAIN,
    SUMMED,
    TENSOR,
    Leaf,
    Values,
    read_value,
    write_value,
)
from gpudist.batch.named_classes import (
    class_named,
    fields_of,
    is_dataclass_instance,
    is_named_tuple,
    name_of,
    rebuild,
)
from gpudist.batch.reading import Reader, malformed, write_text, write_varint
from gpudist.checks.digest import digest_of
from gpudist.errors import ShapeError

LIST, TUPLE, DICT, DATACLASS, NAMED_TUPLE = range(16, 21)
_MAX_DEPTH = 64
_REMEMBERED = 256


class Schema:
    """Decoded structure of a batch, which can be filled with leaves.

    Attributes:
        data: encoded schema.
        digest: digest of ``data``, 16 bytes.
        leaves: leaves in the order of their values.
        values: encoder of the leaves' values.
        has_gradients: whether autograd moves some of the tensors.
    """

    def __init__(self, data: bytes) -> None:
        """Decode a schema.

        Raises:
            TransportError: if the bytes are not a schema, or name a class that this process does
                not have.
        """
        self.data = data
        self.digest = digest_of(data)
        self.leaves: list[Leaf] = []
        reader = Reader(data)
        self._tree = self._read(reader, 0)
        reader.finish()
        self.values = Values(self.leaves)
        tensors = [i for i, leaf in enumerate(self.leaves) if leaf.kind == TENSOR]
        self._constants = [i for i in tensors if not self.leaves[i].requires_grad]
        self._differentiable = [i for i in tensors if self.leaves[i].requires_grad]
        self.has_gradients = bool(self._differentiable)

    @property
    def tree(self) -> Any:
        """``None`` for a leaf; otherwise kind, constructor, and a tree for each child."""
        return self._tree

    def constants(self, parts: Sequence[Any]) -> list[Any]:
        """Return the tensors among the leaves that make up the payload."""
        return [parts[i] for i in self._constants]

    def differentiable(self, parts: Sequence[Any]) -> list[Any]:
        """Return the tensors among the leaves that autograd moves."""
        return [parts[i] for i in self._differentiable]

    def build(
        self,
        parts: Sequence[Any],
        constants: Sequence[Any],
        differentiable: Sequence[Any] = (),
    ) -> Any:
        """Rebuild the batch from its leaves, with received tensors in place of its own."""
        parts = list(parts)
        for i, x in zip(self._constants, constants, strict=True):
            parts[i] = x
        for i, x in zip(self._differentiable, differentiable, strict=True):
            parts[i] = x
        return _build(self._tree, iter(parts))

    def _read(self, reader: Reader, depth: int) -> Any:
        """Read a node: ``None`` for a leaf, else kind, constructor and children."""
        if depth > _MAX_DEPTH:
            raise malformed(f"it is more than {_MAX_DEPTH} containers deep")
        kind = reader.byte()
        if kind <= TENSOR:
            self.leaves.append(_read_tensor(reader) if kind == TENSOR else Leaf(kind))
            return None
        if not LIST <= kind <= NAMED_TUPLE:
            raise malformed(f"{kind} is not a kind of node")
        name = reader.text() if kind >= DATACLASS else ""
        count = reader.varint()
        if count > reader.left:
            raise malformed(f"a container has {count} parts in {reader.left} bytes")
        made_of: Any = None
        if kind == DICT:
            made_of = [_read_key(reader, depth) for _ in range(count)]
            if len(set(made_of)) < count:
                raise malformed("a dict has the same key twice")
        elif kind >= DATACLASS:
            fields = [reader.text() for _ in range(count)]
            made_of = class_named(name, fields, kind == NAMED_TUPLE), fields
        return kind, made_of, [self._read(reader, depth + 1) for _ in range(count)]


@lru_cache(maxsize=_REMEMBERED)
def schema_of(data: bytes) -> Schema:
    """Decode a schema; results are cached."""
    return Schema(data)


def flatten(batch: Any, differentiable: bool = False) -> tuple[bytes, list[Any]]:
    """Return the encoded schema of ``batch`` and its leaves.

    Args:
        batch: any nest that :func:`gpudist.broadcast_batch` accepts.
        differentiable: whether to mark tensors that require grad.

    Raises:
        ShapeError: if something in the batch cannot be sent; the error names it and its place.
    """
    out = bytearray()
    values: list[Any] = []
    _flatten(out, values, batch, "batch", 0, differentiable)
    return bytes(out), values


def _flatten(
    out: bytearray, values: list[Any], value: Any, where: str, depth: int, differentiable: bool
) -> None:
    if depth > _MAX_DEPTH:
        raise ShapeError(
            f"{where[:80]}... is more than {_MAX_DEPTH} containers deep; does it contain itself?"
        )
    kind = PLAIN.get(type(value))
    if kind is not None:
        out.append(kind)
        values.append(value)
        return
    if isinstance(value, torch.Tensor):
        _write_tensor(out, value, where, differentiable)
        values.append(value)
        return
    for name, part in _open(out, value, where):
        _flatten(out, values, part, f"{where}{name}", depth + 1, differentiable)


def _open(out: bytearray, value: Any, where: str) -> list[tuple[str, Any]]:
    """Write the container; return its children, each with its name in error messages."""
    cls = type(value)
    if cls in (list, tuple):
        out.append(LIST if cls is list else TUPLE)
        write_varint(out, len(value))
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if cls is dict:
        out.append(DICT)
        write_varint(out, len(value))
        for key in value:
            _write_key(out, key, where, 0)
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if is_named_tuple(value) or is_dataclass_instance(value):
        is_tuple = is_named_tuple(value)
        fields = fields_of(cls)
        class_named(name_of(cls), fields, is_tuple)
        out.append(NAMED_TUPLE if is_tuple else DATACLASS)
        write_text(out, name_of(cls))
        write_varint(out, len(fields))
        for field in fields:
            write_text(out, field)
        return [(f".{field}", getattr(value, field)) for field in fields]
    raise ShapeError(
        f"{where} is a {name_of(cls)}, which cannot be sent; a batch consists of dicts, lists, "
        "tuples, dataclasses, named tuples, tensors, numbers, strings, bytes and None"
    )


def _write_tensor(out: bytearray, x: torch.Tensor, where: str, differentiable: bool) -> None:
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided
    if not is_plain or x.dtype not in DTYPE_NUMBERS or x.dim() > MAX_DIMS:
        raise ShapeError(
            f"{where} is a {type(x).__name__} of {x.dtype} and layout {x.layout} with {x.dim()} "
            f"dims, which cannot be sent; only plain dense tensors of torch's number types can"
        )
    requires_grad = differentiable and x.requires_grad
    if requires_grad and x.dtype not in SUMMED:
        raise ShapeError(f"{where} requires grad, but gradients of {x.dtype} cannot be summed")
    out += bytes((TENSOR, DTYPE_NUMBERS[x.dtype], x.dim(), requires_grad))


def _read_tensor(reader: Reader) -> Leaf:
    dtype, dims, requires_grad = reader.take(3)
    if dtype >= len(DTYPES) or dims > MAX_DIMS or requires_grad > 1:
        raise malformed(f"a tensor has the dtype {dtype}, {dims} dims and the flag {requires_grad}")
    if requires_grad and DTYPES[dtype] not in SUMMED:
        raise malformed(f"a tensor of {DTYPES[dtype]} has a gradient")
    return Leaf(TENSOR, DTYPES[dtype], dims, bool(requires_grad))


def _write_key(out: bytearray, key: Any, where: str, depth: int) -> None:
    kind = PLAIN.get(type(key))
    if kind is not None:
        out.append(kind)
        write_value(out, kind, key)
    elif type(key) is tuple and depth < _MAX_DEPTH:
        out.append(TUPLE)
        write_varint(out, len(key))
        for part in key:
            _write_key(out, part, where, depth + 1)
    else:
        raise ShapeError(
            f"{where} has the key {key!r}, a {name_of(type(key))}, which cannot be sent; keys are "
            f"strings, numbers, bytes, None and tuples of these"
        )


def _read_key(reader: Reader, depth: int) -> Any:
    kind = reader.byte()
    if NONE <= kind <= BYTES:
        return read_value(reader, Leaf(kind))
    if kind != TUPLE or depth > _MAX_DEPTH:
        raise malformed(f"{kind} is not a kind of key")
    count = reader.varint()
    if count > reader.left:
        raise malformed(f"a key has {count} parts in {reader.left} bytes")
    return tuple([_read_key(reader, depth + 1) for _ in range(count)])


def _build(node: Any, values: Iterator[Any]) -> Any:
    if node is None:
        return next(values)
    kind, made_of, children = node
    parts = [_build(child, values) for child in children]
    if kind == LIST:
        return parts
    if kind == TUPLE:
        return tuple(parts)
    if kind == DICT:
        return dict(zip(made_of, parts, strict=True))
    cls, fields = made_of
    return rebuild(cls, fields, parts)
