"""Encode Python integers and floats as 64-bit words to send them between ranks."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import reduce
from math import isnan, nan
from operator import add, mul
from typing import Any

from gpudist.errors import PartitionError

_INTEGERS, _FLOATS = 0, 1
_EXPECTED = "it must be a list of integers of at most 64 bits, or of floats"
_COMBINE: dict[str, Any] = {"sum": add, "prod": mul, "max": max, "min": min}


def words_of(where: str, data: Any) -> list[int]:
    """Encode ``data`` as one word for the kind of numbers, followed by their bits.

    Raises:
        PartitionError: a number is neither an integer of at most 64 bits nor a float.
    """
    if not isinstance(data, Iterable):
        raise PartitionError(f"{where}: data is {data!r:.80}; {_EXPECTED}")
    values: list[Any] = list(data)
    if set(map(type, values)) - {int}:
        values = [_number(where, i, value) for i, value in enumerate(values)]
        if any(type(value) is float for value in values):
            floats = [_as_float(where, value) for value in values]
            bits = struct.pack(f"{len(floats)}d", *floats)
            return [_FLOATS, *struct.unpack(f"{len(floats)}q", bits)]
    if values and not -(2**63) <= min(values) <= max(values) < 2**63:
        raise PartitionError(
            f"{where}: data has {max(values, key=abs)}, which has more than 64 bits; {_EXPECTED}"
        )
    return [_INTEGERS, *values]


def _number(where: str, index: int, value: Any) -> int | float:
    # NumPy and torch scalars convert to Python numbers.
    number = value.item() if getattr(value, "shape", None) == () else value
    if type(number) is float:
        return number
    if isinstance(number, int):  # also for True and False
        return int(number)
    raise PartitionError(
        f"{where}: data[{index}] is {value!r:.80}, of type {type(value).__name__}; {_EXPECTED}"
    )


def _as_float(where: str, value: int | float) -> float:
    """Convert ``value`` to float; raise if the conversion is not exact."""
    if type(value) is float:
        return value
    if abs(value) <= 2**53 or (abs(value) < 2**63 and int(float(value)) == value):
        return float(value)
    raise PartitionError(
        f"{where}: {value} is mixed with floats, but float64 cannot represent it; give integers "
        "only"
    )


def numbers_of(words: Sequence[int]) -> list[Any]:
    """Inverse of :func:`words_of`."""
    kind, *values = words
    if kind == _INTEGERS:
        return values
    return list(struct.unpack(f"{len(values)}d", struct.pack(f"{len(values)}q", *values)))


def reduce_rows(where: str, rows: Sequence[Sequence[Any]], op: str) -> list[Any]:
    """Reduce the rows element by element, in order; the results are floats if any row has floats.

    Raises:
        PartitionError: an integer is mixed with floats and float64 cannot represent it.
    """
    if any(type(value) is float for row in rows for value in row):
        rows = [[_as_float(where, value) for value in row] for row in rows]
        return [
            nan if any(map(isnan, column)) else reduce(_COMBINE[op], column)
            for column in zip(*rows, strict=True)
        ]
    return [reduce(_COMBINE[op], column) for column in zip(*rows, strict=True)]
