"""Flatten batches, with a fast path for batches that have the structure of the previous one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpudist.batch.leaves import PLAIN, Leaf, TensorLeaf
from gpudist.batch.schema import Kind, Schema, flatten, schema_of

# Function that appends the leaves of a value, in order, or returns ``False`` if its structure
# differs.
_Take = Callable[[Any, list[Any]], bool]

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
# Types of keys that are equal only if their contents are identical.
_KEYS = frozenset((str, bytes, int, bool, type(None)))


class Flattener:
    """Schemas and leaves of successive batches, most of which have the same structure.

    Args:
        differentiable: whether to mark tensors that require grad.
    """

    def __init__(self, differentiable: bool = False) -> None:
        self._differentiable = differentiable
        self._last: Schema | None = None
        self._take: _Take = _take_nothing

    def flatten(self, batch: Any) -> tuple[Schema, list[Any]]:
        """Return the schema of ``batch`` and its leaves.

        Raises:
            ShapeError: see :func:`~gpudist.batch.schema.flatten`.
        """
        parts: list[Any] = []
        if self._last is not None and self._take(batch, parts):
            return self._last, parts
        data, parts = flatten(batch, self._differentiable)
        self._last = schema_of(data)
        self._take = _taker(self._last.tree, iter(self._last.leaves), self._differentiable)
        return self._last, parts


def _take_nothing(value: Any, parts: list[Any]) -> bool:
    return False


def _taker(node: Any, leaves: Iterator[Leaf], differentiable: bool) -> _Take:
    """Create the function that collects the leaves of a value with this structure."""
    if node is None:
        leaf = next(leaves)
        return _take_plain if leaf is None else _tensor_taker(leaf, differentiable)
    kind, made_of, children = node
    takers = [_taker(child, leaves, differentiable) for child in children]
    if kind == Kind.DICT:
        return _dict_taker(made_of, takers)
    if kind in (Kind.LIST, Kind.TUPLE):
        return _sequence_taker(list if kind == Kind.LIST else tuple, takers)
    cls, fields = made_of
    return _object_taker(cls, fields, takers)


def _take_plain(value: Any, parts: list[Any]) -> bool:
    parts.append(value)
    return type(value) in PLAIN


def _tensor_taker(leaf: TensorLeaf, differentiable: bool) -> _Take:
    dtype, dims, requires_grad = leaf.dtype, leaf.dims, leaf.requires_grad

    def take(x: Any, parts: list[Any]) -> bool:
        parts.append(x)
        return (
            type(x) in _TENSORS
            and x.dtype is dtype
            and x.dim() == dims
            and x.layout is torch.strided
            and (not differentiable or x.requires_grad is requires_grad)
        )

    return take


def _sequence_taker(cls: type, takers: list[_Take]) -> _Take:
    count = len(takers)

    def take(value: Any, parts: list[Any]) -> bool:
        if type(value) is not cls or len(value) != count:
            return False
        return all([take(part, parts) for take, part in zip(takers, value, strict=True)])

    return take


def _dict_taker(keys: list[Any], takers: list[_Take]) -> _Take:
    types = list(map(type, keys))
    if not _KEYS.issuperset(types):
        return _take_nothing

    def take(value: Any, parts: list[Any]) -> bool:
        if type(value) is not dict or list(map(type, value)) != types or list(value) != keys:
            return False
        return all([take(part, parts) for take, part in zip(takers, value.values(), strict=True)])

    return take


def _object_taker(cls: type, fields: list[str], takers: list[_Take]) -> _Take:
    def take(value: Any, parts: list[Any]) -> bool:
        if type(value) is not cls:
            return False
        return all([take(getattr(value, f), parts) for take, f in zip(takers, fields, strict=True)])

    return take
