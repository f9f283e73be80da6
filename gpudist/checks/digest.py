"""Digests that ranks compare instead of whole plans."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from hashlib import blake2b
from types import FunctionType
from typing import Any

from gpudist.errors import ShapeError

DIGEST_BYTES = 16


def digest_of(*parts: bytes) -> bytes:
    """Return a 16-byte digest of the concatenated ``parts``, as stored in message headers."""
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def text_of(x: Any) -> str:
    """Return a text of ``x`` that does not depend on the rank, and differs for other values.

    Objects whose class has no ``__repr__`` are described by their class and fields.

    Raises:
        ShapeError: the text shows an address in memory, which differs between ranks.
    """
    kind = type(x)
    if kind in (tuple, list):
        return f"({', '.join(map(text_of, x))})"
    if kind is FunctionType:
        return f"{x.__module__}.{x.__qualname__}"
    if kind.__repr__ is object.__repr__ or is_dataclass(x):
        if is_dataclass(x):
            names = [field.name for field in fields(x) if field.compare]
        else:
            slots = [name for name in getattr(kind, "__slots__", ()) if hasattr(x, name)]
            names = sorted({*getattr(x, "__dict__", {}), *slots})
        values = ", ".join(f"{name}={text_of(getattr(x, name))}" for name in names)
        return f"{kind.__module__}.{kind.__qualname__}({values})"
    text = repr(x)
    if " at 0x" in text:
        raise ShapeError(
            f"ranks cannot compare {text}, which shows an address in memory; give the class "
            f"{kind.__qualname__} a __repr__ that shows its fields"
        )
    return text
