"""Exact JSON encoding of numbers, texts and tensors of one cell, which avoids pickle."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.errors import CheckpointError


def encode(value: Any, what: str) -> Any:
    """Encode ``value`` in terms of JSON types.

    Args:
        value: a number, text, ``None`` or tensor of shape ``[]``, or a list, tuple or dict of them.
        what: name of the value for errors.

    Raises:
        CheckpointError: if ``value`` is anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, what) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, what) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[str(key), encode(item, what)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        bits = value.detach().cpu().reshape(1).view(torch.uint8).tolist()
        return {"dtype": name_of(value.dtype), "bits": bits}
    kind = (
        f"tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
    )
    raise CheckpointError(f"{what} is a {kind}; it must be a number, a text or a list of them")


def decode(value: Any) -> Any:
    """Decode the result of :func:`encode`.

    Raises:
        CheckpointError: if the dtype of a tensor does not exist in this rank's torch.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(item) for item in value["tuple"])
    if "dict" in value:
        return {key: decode(item) for key, item in value["dict"]}
    bits = torch.tensor(value["bits"], dtype=torch.uint8)
    return bits.view(dtype_of(value["dtype"])).view(())


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
