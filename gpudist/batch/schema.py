"""Structure of a batch, in msgpack.

A schema is a tree. Each node consists of its kind, the information for rebuilding a container, and
its children. Values and shapes, which change at every step, are not part of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch

from gpudist.batch.leaves import (
    DTYPE_NUMBERS,
    DTYPES,
    MAX_DIMS,
    PLAIN,
    SUMMED,
    Leaf,
    TensorLeaf,
    Values,
)
from gpudist.batch.named_classes import (
    class_named,
    fields_of,
    is_dataclass_instance,
    makes_named_tuples,
    name_of,
    rebuild,
)
from gpudist.batch.packing import batch_error, decode_values, encode_values
from gpudist.checks.digest import digest_of
from gpudist.errors import ShapeError


class Kind(IntEnum):
    VALUE, TENSOR, LIST, TUPLE, DICT, DATACLASS, NAMED_TUPLE = range(7)


_MAX_DEPTH = 64
_REMEMBERED = 256


class Schema:
    """Decoded structure of a batch, which can be filled with leaves.

    Attributes:
        data: encoded schema.
        digest: digest of ``data``, 16 bytes.
        tree: ``None`` for a leaf; otherwise kind, constructor, and a tree for each child.
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
        self.tree = self._read(decode_values(data), 0)
        self.values = Values(self.leaves)
        tensors = [(i, leaf) for i, leaf in enumerate(self.leaves) if leaf is not None]
        self._constants = [i for i, leaf in tensors if not leaf.requires_grad]
        self._differentiable = [i for i, leaf in tensors if leaf.requires_grad]
        self.has_gradients = bool(self._differentiable)

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
        return _build(self.tree, iter(parts))

    def _read(self, node: Any, depth: int) -> Any:
        """Check a node: ``None`` for a leaf, else kind, constructor and children."""
        if depth > _MAX_DEPTH:
            raise batch_error(f"it is more than {_MAX_DEPTH} containers deep")
        made_of: Any = None
        match node:
            case Kind.VALUE:
                self.leaves.append(None)
                return None
            case (Kind.TENSOR, int(dtype), int(dims), bool(requires_grad)):
                self.leaves.append(_tensor_leaf(dtype, dims, requires_grad))
                return None
            case (Kind.LIST | Kind.TUPLE, *children):
                pass
            case (Kind.DICT, (*made_of,), *children) if all(map(_is_key, made_of)):
                if not len(set(made_of)) == len(made_of) == len(children):
                    raise batch_error("a dict has the same key twice, or too few or too many keys")
            case (Kind.DATACLASS | Kind.NAMED_TUPLE, str(name), (*fields,), *children):
                made_of = class_named(name, fields, node[0] == Kind.NAMED_TUPLE), fields
                if len(fields) != len(children):
                    raise batch_error(f"{name} has {len(fields)} fields and {len(children)} values")
            case _:
                raise batch_error(f"a {type(node).__name__} is not a part of a structure")
        return node[0], made_of, [self._read(child, depth + 1) for child in children]


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
    values: list[Any] = []
    return encode_values(_flatten(values, batch, "batch", 0, differentiable)), values


def _flatten(values: list[Any], value: Any, where: str, depth: int, differentiable: bool) -> Any:
    if depth > _MAX_DEPTH:
        raise ShapeError(
            f"{where[:80]}... is more than {_MAX_DEPTH} containers deep; does it contain itself?"
        )
    if type(value) in PLAIN:
        values.append(value)
        return Kind.VALUE
    if isinstance(value, torch.Tensor):
        values.append(value)
        return _tensor_node(value, where, differentiable)
    node, parts = _open(value, where)
    children = [_flatten(values, x, f"{where}{n}", depth + 1, differentiable) for n, x in parts]
    return (*node, *children)


def _open(value: Any, where: str) -> tuple[tuple[Any, ...], list[tuple[str, Any]]]:
    """Node of a container without its children; children, with their names in errors."""
    cls = type(value)
    if cls in (list, tuple):
        kind = Kind.LIST if cls is list else Kind.TUPLE
        return (kind,), [(f"[{i}]", part) for i, part in enumerate(value)]
    if cls is dict:
        for key in value:
            if not _is_key(key):
                raise ShapeError(
                    f"{where} has the key {key!r}, a {name_of(type(key))}, which cannot be sent; "
                    f"keys are strings, numbers, bytes, None and tuples of these"
                )
        return (Kind.DICT, tuple(value)), [(f"[{key!r}]", part) for key, part in value.items()]
    is_tuple = makes_named_tuples(cls)
    if is_tuple or is_dataclass_instance(value):
        fields = fields_of(cls)
        class_named(name_of(cls), fields, is_tuple)
        kind = Kind.NAMED_TUPLE if is_tuple else Kind.DATACLASS
        parts = [(f".{field}", getattr(value, field)) for field in fields]
        return (kind, name_of(cls), fields), parts
    raise ShapeError(
        f"{where} is a {name_of(cls)}, which cannot be sent; a batch consists of dicts, lists, "
        "tuples, dataclasses, named tuples, tensors, numbers, strings, bytes and None"
    )


def _tensor_node(x: torch.Tensor, where: str, differentiable: bool) -> tuple[Any, ...]:
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided
    if not is_plain or x.dtype not in DTYPE_NUMBERS or x.dim() > MAX_DIMS:
        raise ShapeError(
            f"{where} is a {type(x).__name__} of {x.dtype} and layout {x.layout} with {x.dim()} "
            f"dims, which cannot be sent; only plain dense tensors of torch's number types can"
        )
    requires_grad = differentiable and x.requires_grad
    if requires_grad and x.dtype not in SUMMED:
        raise ShapeError(f"{where} requires grad, but gradients of {x.dtype} cannot be summed")
    return Kind.TENSOR, DTYPE_NUMBERS[x.dtype], x.dim(), requires_grad


def _tensor_leaf(dtype: int, dims: int, requires_grad: bool) -> TensorLeaf:
    if not 0 <= dtype < len(DTYPES) or not 0 <= dims <= MAX_DIMS:
        raise batch_error(f"a tensor has the dtype {dtype} and {dims} dims")
    if requires_grad and DTYPES[dtype] not in SUMMED:
        raise batch_error(f"a tensor of {DTYPES[dtype]} has a gradient")
    return TensorLeaf(DTYPES[dtype], dims, requires_grad)


def _is_key(key: Any, depth: int = 0) -> bool:
    if type(key) is tuple:
        return depth < _MAX_DEPTH and all([_is_key(part, depth + 1) for part in key])
    return type(key) in PLAIN


def _build(node: Any, values: Iterator[Any]) -> Any:
    if node is None:
        return next(values)
    kind, made_of, children = node
    parts = [_build(child, values) for child in children]
    if kind == Kind.DICT:
        return dict(zip(made_of, parts, strict=True))
    if kind == Kind.LIST:
        return parts
    if kind == Kind.TUPLE:
        return tuple(parts)
    cls, fields = made_of
    return rebuild(cls, fields, parts)
