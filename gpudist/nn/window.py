"""Arguments that torch takes as one number or one per dim."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.errors import ShapeError


def per_dim(name: str, what: str, value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """``value`` for each of ``dims`` dims."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims:
        raise ShapeError(f"{name}: {what} has {len(values)} entries but the layer has {dims} dims")
    return values
