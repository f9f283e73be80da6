"""Arguments of windows: one number or one per dim, as in torch, and paddings that fit the input."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch

from gpudist.errors import ShapeError
from gpudist.geometry.windows import require_padding_fits


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


def require_padding_of_input(
    name: str,
    mode: str,
    paddings: Sequence[tuple[int, int]],
    extents: Sequence[int],
) -> None:
    """Raise if the extents of an input do not fit the padding, like torch's layer.

    Raises:
        ShapeError: on every rank alike, naming the layer and the dim.
    """
    for d, (padding, extent) in enumerate(zip(paddings, extents, strict=True)):
        try:
            require_padding_fits(mode, padding, extent)
        except ShapeError as error:
            raise ShapeError(f"{name}, dim {d + 2}: {error}") from None
