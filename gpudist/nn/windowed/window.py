"""Arguments that, as in torch, are one number or one number per dim."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch

from gpudist.errors import ShapeError


def per_dim(name: str, what: str, value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return ``value`` as one integer for each of ``dims`` dims."""
    if isinstance(value, torch.Tensor):  # torch's layers also raise, when they are called
        raise ShapeError(
            f"{name}: {what} is a tensor; it takes an integer or one per dim: {what}.item()"
        )
    try:
        values = (index(value),) * dims  # pyright: ignore[reportArgumentType]
    except TypeError:
        values = tuple(map(index, value))  # pyright: ignore[reportArgumentType]
    if len(values) != dims:
        raise ShapeError(
            f"{name}: {what} has {len(values)} entries, but the layer has {dims} dims; pass one "
            f"number or {dims}"
        )
    return values
