"""Numbers, texts and tensors of one cell as JSON, exactly, so that nothing has to be unpickled."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.errors import CheckpointError


def encode(value: Any, what: str) -> Any:
    """``value`` as what JSON has.

    Args:
        value: a number, text, ``None`` or tensor of shape ``[]``, or a list, tuple or dict of them.
        what: it is, for errors.

    Raises:
        CheckpointError: it is something else.
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
    """What :func:`encode` was given.

    Raises:
        CheckpointError: it has a tensor of a dtype that this rank's torch does not have.
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
    """What :func:`name_of` was given, on a rank of any torch.

    Raises:
        CheckpointError: this rank's torch does not have it.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{name!r} is no dtype of torch {torch.__version__}; run the same torch on every rank"
        )
    return dtype
