"""Look up dataclasses and named tuples by name, and rebuild instances without running their code.

Names in messages never cause an import, the call of a class or unpickling. Classes are looked up in
the modules that this process has already imported. Instances are created as by ``copy``: fields are
set directly, and neither ``__init__`` nor ``__post_init__`` runs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from gpudist.errors import TransportError


def is_dataclass_instance(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def makes_named_tuples(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def fields_of(cls: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return getattr(cls, "_fields", ())


def class_named(name: str, fields: Sequence[str], is_tuple: bool) -> type:
    """Find the class that :func:`name_of` names, and check that it has the given fields.

    Raises:
        TransportError: if this process does not have the class, or its fields differ.
    """
    module, _, qualname = name.partition(":")
    value: Any = sys.modules.get(module)
    if value is None:
        raise TransportError(
            f"the batch has a {name}, but this process has not imported {module!r}, and receiving "
            f"a batch imports nothing: import it on every rank before the first batch"
        )
    for part in qualname.split("."):
        # getattr is not used, because a module's own __getattr__ may import.
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    is_it = isinstance(value, type) and name_of(value) == name
    is_kind = is_it and (makes_named_tuples if is_tuple else dataclasses.is_dataclass)(value)
    if not is_kind or not _can_be_made(value, is_tuple):
        raise TransportError(
            f"the batch has a {name}, but this process finds no "
            f"{'named tuple' if is_tuple else 'dataclass'} of this name: define it at the top "
            f"level of a module that every rank imports"
        )
    if fields_of(value) != tuple(fields):
        raise TransportError(
            f"the batch has a {name} with the fields {list(fields)}, but on this rank it has "
            f"{list(fields_of(value))}: run the same program on every rank"
        )
    return value


def _can_be_made(cls: type, is_tuple: bool) -> bool:
    if is_tuple:
        return True
    try:
        object.__new__(cls)
    except TypeError:
        return False  # The dataclass is also a dict, or is abstract.
    return True


def rebuild(cls: type, fields: Sequence[str], values: Sequence[Any]) -> Any:
    """Create an instance with these field values without running code of the class."""
    if issubclass(cls, tuple):
        return tuple.__new__(cls, values)
    instance = object.__new__(cls)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(instance, field, value)
    return instance
