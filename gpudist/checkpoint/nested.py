"""Nested values in a checkpoint, which torch stores as one entry per leaf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from gpudist.errors import CheckpointError

# Keys of dicts and positions in lists, from the outside in.
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Entire:
    """Value that is stored as one entry."""

    value: Any


class NestedPlanner(DefaultSavePlanner):
    """Torch's planner, which stores the value of an :class:`Entire` as one entry."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if isinstance(object, Entire):
            object = object.value
        return super().transform_object(write_item, object)


def entries_of(value: Any) -> Any:
    """Return ``value``, or an :class:`Entire` if :func:`assemble` would not return an equal one.

    Torch divides dicts, and lists that contain dicts or tensors. It drops empty ones, and turns
    keys into texts and every mapping into a dict.
    """
    return value if _survives(value) else Entire(value)


def _survives(value: Any) -> bool:
    if type(value) is dict:
        return bool(value) and all(type(k) is str and _survives(v) for k, v in value.items())
    if type(value) is list:
        return all(map(_survives, value))
    return not isinstance(value, Mapping)


def assemble(entries: Iterable[tuple[Path, Any]], what: str) -> Any:
    """Return the value that torch has divided into entries.

    Args:
        entries: path inside the value, and the leaf at its end.
        what: name of the value for errors.

    Raises:
        CheckpointError: if the entries do not form one value.
    """
    entries = list(entries)
    if [path for path, _ in entries] == [()]:
        return entries[0][1]
    items: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, leaf in entries:
        if not path:
            raise CheckpointError(f"{what} is both one value and several; the index is damaged")
        items.setdefault(path[0], []).append((path[1:], leaf))
    if all(type(key) is str for key in items):
        return {key: assemble(inside, f"{what}.{key}") for key, inside in items.items()}
    numbers = range(len(items))
    if any(number not in items or type(number) is not int for number in numbers):
        raise CheckpointError(
            f"{what} has the items {list(items)}, not 0 to {len(items) - 1}; the index is damaged"
        )
    return [assemble(items[number], f"{what}.{number}") for number in numbers]
