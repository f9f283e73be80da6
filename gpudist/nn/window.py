"""Arguments that torch takes as one number or one per dim."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from gpudist.errors import ShapeError


def per_dim(name: str, what: str, value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """``value`` for each of ``dims`` dims."""
    try:
        values = (index(value),) * dims  # pyright: ignore[reportArgumentType]
    except TypeError:
        values = tuple(map(index, value))  # pyright: ignore[reportArgumentType]
    if len(values) != dims:
        raise ShapeError(f"{name}: {what} has {len(values)} entries but the layer has {dims} dims")
    return values
