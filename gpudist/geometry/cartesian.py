"""Conversion between ranks and indices on a Cartesian grid of workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from operator import index as index_value

from gpudist.errors import PartitionError


def rank_of(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the row-major rank of ``index`` on a grid of ``shape``."""
    rank = 0
    for i, extent in zip(index, shape, strict=True):
        rank = rank * extent + i
    return rank


def index_of(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major index of ``rank``; the inverse of :func:`rank_of`."""
    index: list[int] = []
    for extent in reversed(shape):
        rank, i = divmod(rank, extent)
        index.append(i)
    return tuple(reversed(index))


def column_major_number(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the position of ``index`` when the first axis varies fastest."""
    return rank_of(tuple(reversed(index)), tuple(reversed(shape)))


def column_major_index(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index at a position; the inverse of :func:`column_major_number`."""
    return tuple(reversed(index_of(number, tuple(reversed(shape)))))


def pad_left(values: Iterable[int], dim: int, fill: int) -> tuple[int, ...]:
    """Prepend ``fill`` to ``values`` up to a length of ``dim``."""
    values = tuple(values)
    return (fill,) * (dim - len(values)) + values


def size_of(shape: Sequence[int]) -> int:
    """Return the number of workers on a grid of ``shape``."""
    return prod(shape)


def integers(numbers: Iterable[object], what: str) -> tuple[int, ...]:
    """Convert ``numbers`` to integers, without rounding numbers or parsing text.

    Raises:
        PartitionError: if one of them is not an integer.
    """
    try:
        return tuple(map(index_value, numbers))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise PartitionError(f"{what} must be a list of integers, not {numbers!r:.200}") from None
