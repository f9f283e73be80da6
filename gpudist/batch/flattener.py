"""Flatten a batch into the description of its structure and its leaves."""

from __future__ import annotations

import warnings
from collections import UserDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from gpudist.batch.leaves import DTYPE_NUMBERS, MAX_DIMS, PLAIN, SUMMED
from gpudist.batch.named_classes import base_of, fields_of, name_of, reference_to
from gpudist.batch.packing import encode_values
from gpudist.batch.schema import FACTORIES, MAX_DEPTH, TENSOR, VALUE, Schema, is_key, schema_of
from gpudist.errors import GpudistError, ShapeError

_DICT = reference_to(dict)
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
# Reference to a container's class, names of its attributes, keys of its items, and its parts.
_Opened = tuple[Any, Sequence[str], Sequence[Any], Iterable[Any]]


class _CannotSend(Exception):
    """Reason why a value cannot be sent.

    Attributes:
        place: where the value is in the container that is being flattened.
    """

    place = ""


def flatten(batch: Any, differentiable: bool = False) -> tuple[Schema, list[Any]]:
    """Return the schema of ``batch`` and its leaves.

    Args:
        batch: any nest that :func:`gpudist.broadcast_batch` accepts.
        differentiable: whether to mark tensors that require grad.

    Raises:
        ShapeError: if something in the batch cannot be sent; the error names it and its place.
        TransportError: if a class cannot be found by its name.
    """
    leaves: list[Any] = []
    try:
        node = _flatten(batch, leaves, differentiable, 0)
    except _CannotSend as error:
        raise ShapeError(f"batch{error.place:.80} {error}") from None
    return schema_of(encode_values(node)), leaves


def _flatten(value: Any, leaves: list[Any], differentiable: bool, depth: int) -> Any:
    """Append the leaves of ``value`` to ``leaves``; return the node that describes it."""
    cls = type(value)
    if cls in PLAIN:
        leaves.append(value)
        return VALUE
    if cls in _TENSORS and value.layout is torch.strided:
        leaves.append(value)
        return _tensor_node(value, differentiable and value.requires_grad)
    if depth == MAX_DEPTH:
        raise _CannotSend(f"is more than {MAX_DEPTH} containers deep; does it contain itself?")
    reference, attributes, keys, parts = _open(value)
    children: list[Any] = []
    try:
        for part in parts:
            children.append(_flatten(part, leaves, differentiable, depth + 1))
    except _CannotSend as error:
        names = [f".{name}" for name in attributes] + [f"[{key!r}]" for key in keys]
        number = len(children)
        error.place = (names[number] if names else f"[{number}]") + error.place
        raise
    return reference, attributes, keys, *children


def _tensor_node(x: torch.Tensor, requires_grad: bool) -> tuple[Any, ...]:
    number, dims = DTYPE_NUMBERS.get(x.dtype), x.dim()
    if number is None or dims > MAX_DIMS or x.is_meta or x.is_nested:
        raise _CannotSend(
            f"is a {'nested ' * x.is_nested}tensor of {x.dtype} with {dims} dims on {x.device}, "
            f"which cannot be sent; only plain dense and jagged tensors of torch's number types "
            f"with at most {MAX_DIMS} dims can"
        )
    if requires_grad and x.dtype not in SUMMED:
        raise _CannotSend(f"requires grad, but gradients of {x.dtype} cannot be summed")
    return TENSOR, number, dims, requires_grad


def _open(value: Any) -> _Opened:
    cls = type(value)
    if cls is dict:
        return _DICT, (), _keys_of(value), value.values()
    if isinstance(value, torch.Tensor):
        return _open_jagged(value)
    if isinstance(value, np.ndarray | np.generic):
        return _open_array(value)
    reference, names = reference_to(cls), fields_of(cls)
    if reference is None:
        raise _CannotSend(
            f"is a {name_of(cls)}, which cannot be sent; a batch consists of dicts and other "
            "mappings, lists, tuples, dataclasses, named tuples, enums, tensors, NumPy arrays, "
            "numbers, strings, bytes and None"
        )
    if isinstance(value, Enum):
        if value.name not in cls.__members__:
            raise _CannotSend(f"is {value!r}, which has no name; send its value")
        return reference, (), (), (value.name,)
    if names is not None:
        return reference, names, (), [getattr(value, name) for name in names]
    if isinstance(value, Mapping):
        return _open_mapping(reference, value)
    return reference, (), (), value


def _open_mapping(reference: Any, value: Any) -> _Opened:
    base = base_of(type(value))
    items = dict(base.items(value)) if issubclass(base, dict) else {}
    attributes = dict(getattr(value, "__dict__", {}))
    for name, part in attributes.items():
        # Where a mapping that is neither a dict nor a UserDict keeps its items is unknown.
        if issubclass(base, dict) or (isinstance(value, UserDict) and name != "data"):
            attributes[name] = _part_or_none(name, part)
    if base is defaultdict:
        factory: Any = value.default_factory  # pyright: ignore
        if factory not in FACTORIES:
            raise _CannotSend(f"has the factory {factory!r}, which cannot be sent; send a dict")
        attributes["default_factory"] = FACTORIES.index(factory)
    return reference, tuple(attributes), _keys_of(items), [*attributes.values(), *items.values()]


def _part_or_none(name: str, part: Any) -> Any:
    try:
        flatten(part)
    except GpudistError as error:
        warnings.warn(f"{name} of a mapping in a batch becomes None: {error}", stacklevel=2)
        return None
    return part


def _keys_of(items: dict[Any, Any]) -> tuple[Any, ...]:
    keys = tuple(items)
    if not PLAIN.issuperset(map(type, keys)):
        for key in keys:
            if not is_key(key):
                raise _CannotSend(
                    f"has the key {key!r}, a {name_of(type(key))}, which cannot be sent; keys are "
                    f"strings, numbers, bytes, None and tuples of these"
                )
    return keys


def _open_array(value: Any) -> _Opened:
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise _CannotSend(f"is a {name_of(type(value))}; send np.asarray of it")
    cls = np.ndarray if isinstance(value, np.ndarray) else np.generic
    try:
        x = torch.from_numpy(np.require(value, requirements=("C", "W")))
    except (TypeError, ValueError) as error:
        raise _CannotSend(f"is a NumPy array of {value.dtype}: {error}") from None
    return reference_to(cls), (), (), (x,)


def _open_jagged(x: torch.Tensor) -> _Opened:
    if not x.is_nested or x.layout != torch.jagged:
        raise _CannotSend(
            f"is a {type(x).__name__} of layout {x.layout}, which cannot be sent; only plain dense "
            f"tensors and jagged nested tensors can"
        )
    if x.lengths() is not None:  # pyright: ignore
        x = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)
    dim = next(dim for dim, extent in enumerate(x.shape) if not isinstance(extent, int))
    offsets = x.offsets().to("cpu", torch.int64)  # pyright: ignore
    return reference_to(torch.Tensor), (), (), (x.values(), offsets.numpy().tobytes(), dim)
