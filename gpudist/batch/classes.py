"""Dataclasses and named tuples by name: found among what is imported, rebuilt without their code.

No name that comes over the wire imports a module, calls a class or unpickles anything. A class is
looked up in the modules this process has already, and an instance is made as ``copy`` makes one:
its fields are set as they were, and neither ``__init__`` nor ``__post_init__`` runs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from gpudist.errors import TransportError


def is_dataclass_instance(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_named_tuple(value: object) -> bool:
    return _makes_named_tuples(type(value))


def _makes_named_tuples(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def fields_of(cls: type) -> tuple[str, ...]:
    """Names of the fields of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return getattr(cls, "_fields", ())


def class_named(name: str, fields: Sequence[str], is_tuple: bool) -> type:
    """The class that :func:`name_of` names, if this process has it and its fields are these.

    Raises:
        TransportError: it has not; says what to do.
    """
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    if found is None:
        raise TransportError(
            f"the batch has a {name}, but this process has not imported {module!r}, and a batch "
            f"imports nothing: import it on every rank before the first batch"
        )
    for part in qualname.split("."):
        # Not getattr: a module's own __getattr__ may import.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_it = isinstance(found, type) and name_of(found) == name
    is_kind = is_it and (_makes_named_tuples if is_tuple else dataclasses.is_dataclass)(found)
    if not is_kind or not _can_be_made(found, is_tuple):
        raise TransportError(
            f"the batch has a {name}, which is no {'named tuple' if is_tuple else 'dataclass'} "
            f"that can be found by this name: define it at the top level of a module that every "
            f"rank imports"
        )
    if fields_of(found) != tuple(fields):
        raise TransportError(
            f"the batch has a {name} with the fields {list(fields)}, but here it has "
            f"{list(fields_of(found))}: run the same program on every rank"
        )
    return found


def _can_be_made(cls: type, is_tuple: bool) -> bool:
    if is_tuple:
        return True
    try:
        object.__new__(cls)
    except TypeError:
        return False  # a dataclass that is also a dict, or abstract
    return True


def rebuild(cls: type, fields: Sequence[str], values: Sequence[Any]) -> Any:
    """An instance with these fields, made without running any of the class's code."""
    if issubclass(cls, tuple):
        return tuple.__new__(cls, values)
    instance = object.__new__(cls)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(instance, field, value)
    return instance
