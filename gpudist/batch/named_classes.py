"""Name the classes of containers, and look them up without running their code.

Names in messages never cause an import, the call of a class or unpickling. Classes are looked up in
the modules that this process has already imported.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gpudist.errors import TransportError

# Numbers by which messages refer to classes. A container of class torch.Tensor is a jagged tensor.
CLASSES: dict[Any, Any] = {
    2: list,
    3: tuple,
    4: dict,
    5: torch.Size,
    6: torch.Tensor,
    7: np.ndarray,
    8: np.generic,
}
_NUMBERS = {cls: number for number, cls in CLASSES.items()}
_BASES = (OrderedDict, defaultdict, dict, tuple, object)


def name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


@lru_cache(maxsize=256)
def reference_to(cls: type) -> int | str | None:
    """Return what :func:`class_of` takes for ``cls``; ``None`` if instances cannot be sent.

    Raises:
        TransportError: if this process does not find the class by its name.
    """
    if cls in _NUMBERS:
        return _NUMBERS[cls]
    if base_of(cls) is None:
        return None
    class_of(name_of(cls))
    return name_of(cls)


def class_of(reference: int | str) -> Any:
    """Find the class to which a message refers.

    Raises:
        TransportError: if this process does not have the class.
    """
    if reference in CLASSES:
        return CLASSES[reference]
    module, _, qualname = str(reference).partition(":")
    value: Any = sys.modules.get(module)
    if value is None:
        raise TransportError(
            f"the batch has a {reference}, but this process has not imported {module!r}, and "
            f"receiving a batch imports nothing: import it on every rank before the first batch"
        )
    for part in qualname.split("."):
        # getattr is not used, because a module's own __getattr__ may import.
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    if not isinstance(value, type) or name_of(value) != reference or base_of(value) is None:
        raise TransportError(
            f"the batch has a {reference}, but this process finds no dataclass, named tuple, enum "
            f"or mapping of this name: define it at the top level of a module that every rank "
            f"imports"
        )
    return value


@lru_cache(maxsize=256)
def base_of(cls: type) -> Any:
    """Return the class whose own methods create and fill instances of ``cls``.

    The result is ``None`` if instances of ``cls`` cannot be sent.
    """
    if issubclass(cls, Enum):
        return Enum
    base: Any = next(base for base in _BASES if issubclass(cls, base))
    if fields_of(cls) is not None or (issubclass(cls, Mapping) and _is_all_dicts(cls)):
        with suppress(TypeError):  # The class has other bases in C, or is abstract.
            base.__new__(cls)
            return base
    return None


@lru_cache(maxsize=256)
def fields_of(cls: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass or a named tuple, ``None`` of other classes."""
    if issubclass(cls, dict | Enum):
        return None
    if is_dataclass(cls):
        return tuple([field.name for field in fields(cls)])
    names = getattr(cls, "_fields", None)
    return names if issubclass(cls, tuple) and isinstance(names, tuple) else None


def _is_all_dicts(cls: type) -> bool:
    # Its state is its items and attributes, and no code of its own runs when it is freed.
    return not any([vars(c).get("__slots__") for c in cls.__mro__]) and not hasattr(cls, "__del__")
