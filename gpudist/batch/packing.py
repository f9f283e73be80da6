"""Encode values as msgpack, which only names data, and decode them."""

from __future__ import annotations

import struct
from typing import Any

from msgpack import ExtType, packb, unpackb

from gpudist.errors import TransportError

_INTEGER, _COMPLEX = 1, 2
_PAIR = struct.Struct("<dd")


def batch_error(what: str) -> TransportError:
    """Return the error for bytes that are not a batch, with the reason ``what``."""
    return TransportError(
        f"received bytes that are not a valid batch: {what}; run the same gpudist on every rank, "
        f"and call the same operations in the same order"
    )


def encode_values(value: Any) -> bytes:
    return packb(value, default=_encode, unicode_errors="surrogatepass")  # pyright: ignore


def decode_values(data: bytes) -> Any:
    """Decode the result of :func:`encode_values`; lists become tuples.

    Raises:
        TransportError: if the bytes are not one value.
    """
    try:
        return unpackb(data, ext_hook=_decode, use_list=False, unicode_errors="surrogatepass")
    except Exception as error:  # bytes can fail in any way
        raise batch_error(f"{type(error).__name__}: {error}") from None


def _encode(value: Any) -> ExtType:
    if type(value) is complex:
        return ExtType(_COMPLEX, _PAIR.pack(value.real, value.imag))
    # Integers of more than 64 bits.
    return ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _decode(kind: int, data: bytes) -> Any:
    if kind == _COMPLEX:
        return complex(*_PAIR.unpack(data))
    if kind == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    raise ValueError(f"{kind} is not a kind of value")
