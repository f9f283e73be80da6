"""Exact JSON encoding of the values that a checkpoint stores beside tensors; it avoids pickle."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from gpudist.checks.storage import storage_problem
from gpudist.errors import CheckpointError

_DEPTH = 50
# Longer integers need an opcode of pickle that torch does not read.
_BITS = 2000


def encode(original: Any, what: str, *, cells: int | None = 1, depth: int = 0) -> Any:
    """Encode ``original`` in terms of JSON types.

    Args:
        original: a number, text, ``bytes``, ``None``, dtype, device or tensor, or a list, tuple,
            set or dict of them. A NumPy number becomes the Python number of the same value.
        what: name of the value for errors.
        cells: maximum number of cells of a tensor; ``None`` means any number.
        depth: number of containers around the value.

    Raises:
        CheckpointError: if ``original`` is anything else, also an instance of a subclass, or
            contains itself.
    """

    def inside(item: Any, place: Any) -> Any:
        return encode(item, f"{what}[{place!r:.80}]", cells=cells, depth=depth + 1)

    if depth > _DEPTH:
        raise CheckpointError(
            f"{what:.80}... is nested in more than {_DEPTH} containers or contains itself; flatten "
            "it, or save it outside the checkpoint"
        )
    value: Any = original
    if isinstance(original, np.generic) and type(original.item()) in _SCALARS:
        value = original.item()
    kind: Any = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int and value.bit_length() <= _BITS:
        return value
    if kind is list:
        return [inside(item, i) for i, item in enumerate(value)]
    if kind in (tuple, torch.Size):
        return {_NAMES[kind]: [inside(item, i) for i, item in enumerate(value)]}
    if kind is set:
        return {"set": sorted((inside(item, item) for item in value), key=json.dumps)}
    if kind in (dict, OrderedDict):
        return {_NAMES[kind]: [[inside(k, k), inside(v, k)] for k, v in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": b64encode(value).decode()}
    if kind is torch.dtype:
        return {"named": name_of(value)}
    if kind is torch.device:
        return {"device": str(value)}
    is_dense = isinstance(value, torch.Tensor) and not (storage_problem(value) or value.is_meta)
    if is_dense and (cells is None or value.numel() <= cells):
        return {"tensor": _bits_of(value), "dtype": name_of(value.dtype), "shape": [*value.shape]}
    kind_text = f"tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else kind
    cell = "tensor" if cells is None else "tensor of one cell"
    raise CheckpointError(
        f"{what} is a {kind_text}; it must be a number, a text or a list of them (or a tuple, set, "
        f"dict, dtype, device or {cell}): convert it, or save it outside the checkpoint"
    )


_SCALARS = (bool, int, float, complex, str, bytes)
_NAMES = {tuple: "tuple", torch.Size: "size", dict: "dict", OrderedDict: "ordered"}


def decode(value: Any) -> Any:
    """Decode the result of :func:`encode`.

    Raises:
        CheckpointError: if the dtype of a tensor does not exist in this rank's torch.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _tensor_of(value["tensor"], dtype_of(value["dtype"]), value["shape"])
    ((name, content),) = value.items()
    match name:
        case "tuple" | "size":
            return (tuple if name == "tuple" else torch.Size)(map(decode, content))
        case "dict" | "ordered":
            pairs = [(decode(key), decode(item)) for key, item in content]
            return dict(pairs) if name == "dict" else OrderedDict(pairs)
        case "set":
            return set(map(decode, content))
        case "complex":
            return complex(*content)
        case "bytes":
            return b64decode(content)
        case "named":
            return dtype_of(content)
        case _:
            return torch.device(content)


def text_of_values(values: dict[str, Any]) -> str:
    """Return values by name as JSON; equal for equal values only, and NaN equals NaN.

    Raises:
        CheckpointError: as :func:`encode`.
    """
    return json.dumps({name: encode(x, name, cells=None) for name, x in values.items()})


def _bits_of(x: torch.Tensor) -> str:
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return b64encode(x.view(torch.uint8).numpy().tobytes()).decode()


def _tensor_of(bits: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    x = torch.empty(shape, dtype=dtype)
    if x.numel():
        data = torch.frombuffer(bytearray(b64decode(bits)), dtype=torch.uint8)
        x.reshape(-1).view(torch.uint8).copy_(data)
    return x


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of :func:`name_of`, which may have run with another version of torch.

    Raises:
        CheckpointError: if the dtype does not exist in this rank's torch.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"torch {torch.__version__} has no dtype {name!r}; run the same torch on every rank"
        )
    return dtype
