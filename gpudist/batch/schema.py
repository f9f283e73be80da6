"""Structure of a batch, in msgpack, and the batch that it makes of leaves.

A schema is a tree. A node of a container consists of a reference to its class, the names of its
attributes, the keys of its items, and its children. Values and shapes, which change at every step,
are not part of the schema.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gpudist.batch.leaves import DTYPES, MAX_DIMS, PLAIN, SUMMED, Leaf, TensorLeaf, Values
from gpudist.batch.named_classes import base_of, class_of, fields_of, name_of
from gpudist.batch.packing import batch_error, decode_values
from gpudist.checks.digest import digest_of
from gpudist.errors import TransportError

# What nodes of leaves begin with. Nodes of containers begin with a reference to their class.
VALUE, TENSOR = range(2)
MAX_DEPTH = 64
_REMEMBERED = 256
# Messages refer to default factories of defaultdicts by position, so only append to it.
FACTORIES: tuple[Any, ...] = (
    None, list, dict, set, tuple, int, float, complex, bool, str, bytes,
)  # fmt: skip


class Schema:
    """Decoded structure of a batch, which can be filled with leaves.

    Attributes:
        data: encoded schema.
        digest: digest of ``data``, 16 bytes.
        tree: ``None`` for a leaf; otherwise class, attributes, keys, and a tree for each child.
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
        """Rebuild the batch from its leaves, with received tensors in place of its own.

        Raises:
            TransportError: if a container cannot be made of its parts.
        """
        parts = list(parts)
        for i, x in zip(self._constants, constants, strict=True):
            parts[i] = x
        for i, x in zip(self._differentiable, differentiable, strict=True):
            parts[i] = x
        try:
            return _build(self.tree, iter(parts)) if self.tree else parts[0]
        except Exception as error:  # parts can be anything
            raise batch_error(f"{type(error).__name__}: {error}") from None

    def _read(self, node: Any, depth: int) -> Any:
        """Check a node: ``None`` for a leaf, else class, attributes, keys and children."""
        match node:
            case 0:
                self.leaves.append(None)
                return None
            case (1, int(dtype), int(dims), bool(requires_grad)):
                self.leaves.append(_tensor_leaf(dtype, dims, requires_grad))
                return None
            case (int() | str() as reference, (*attributes,), (*keys,), *children):
                if depth == MAX_DEPTH:
                    raise batch_error(f"it is more than {MAX_DEPTH} containers deep")
                cls = class_of(reference)
                _check_names(cls, attributes, keys, len(children))
                return cls, attributes, keys, [self._read(child, depth + 1) for child in children]
        raise batch_error(f"a {type(node).__name__} is not a part of a structure")


@lru_cache(maxsize=_REMEMBERED)
def schema_of(data: bytes) -> Schema:
    """Decode a schema; results are cached."""
    return Schema(data)


def is_key(key: Any, depth: int = 0) -> bool:
    """Return whether a dict with this key can be sent."""
    if type(key) is tuple:
        return depth < MAX_DEPTH and all([is_key(part, depth + 1) for part in key])
    return type(key) in PLAIN


def _tensor_leaf(dtype: int, dims: int, requires_grad: bool) -> TensorLeaf:
    if not 0 <= dtype < len(DTYPES) or not 0 <= dims <= MAX_DIMS:
        raise batch_error(f"a tensor has the dtype {dtype} and {dims} dims")
    if requires_grad and DTYPES[dtype] not in SUMMED:
        raise batch_error(f"a tensor of {DTYPES[dtype]} has a gradient")
    return TensorLeaf(DTYPES[dtype], dims, requires_grad)


def _check_names(cls: Any, attributes: list[Any], keys: list[Any], count: int) -> None:
    if not all(map(is_key, keys)) or len(set(keys)) < len(keys):
        raise batch_error("a dict has a wrong key, or the same key twice")
    if len(attributes) + len(keys) not in (0, count) or {*map(type, attributes)} - {str}:
        raise batch_error(f"{count} values have {len(attributes)} names and {len(keys)} keys")
    fields = fields_of(cls)
    if fields is not None and fields != tuple(attributes):
        raise TransportError(
            f"the batch has a {name_of(cls)} with the fields {attributes}, but on this rank it has "
            f"{list(fields)}: run the same program on every rank"
        )


def _build(node: Any, values: Iterator[Any]) -> Any:
    cls, attributes, keys, children = node
    parts = [next(values) if child is None else _build(child, values) for child in children]
    if cls is dict:
        return dict(zip(keys, parts, strict=True))
    if cls is list:
        return parts
    if cls is torch.Size:
        return torch.Size(parts)
    if cls is torch.Tensor:
        return _build_jagged(*parts)
    if cls in (np.ndarray, np.generic):
        array = parts[0].cpu().numpy()
        return array if cls is np.ndarray else array[()]
    if issubclass(cls, Enum):
        return vars(cls)["_member_map_"][parts[0]]
    if issubclass(cls, tuple):
        return tuple.__new__(cls, parts)
    return _build_object(
        cls,
        dict(zip(attributes, parts, strict=False)),
        zip(keys, parts[len(attributes) :], strict=True),
    )


def _build_object(cls: Any, attributes: dict[str, Any], items: Iterable[tuple[Any, Any]]) -> Any:
    """Create a dataclass or a mapping as ``copy`` does, but without running code of the class."""
    base = base_of(cls)
    instance = base.__new__(cls)
    if base is defaultdict:
        factory = FACTORIES[attributes.pop("default_factory")]
        defaultdict.default_factory.__set__(instance, factory)  # pyright: ignore
    if fields_of(cls) is not None:
        for name, part in attributes.items():
            object.__setattr__(instance, name, part)
    elif attributes:
        object.__getattribute__(instance, "__dict__").update(attributes)
    for key, part in items:
        base.__setitem__(instance, key, part)
    return instance


def _build_jagged(values: torch.Tensor, offsets: bytes, dim: int) -> torch.Tensor:
    ends = torch.frombuffer(bytearray(offsets), dtype=torch.int64)
    lengths = ends.diff().tolist()
    if dim < 1 or ends[0] or min(lengths) < 0 or ends[-1] > values.shape[dim - 1]:
        raise batch_error("a jagged tensor has offsets outside its values")
    return torch.nested.nested_tensor_from_jagged(
        values, ends.to(values.device), jagged_dim=dim, min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )  # fmt: skip
