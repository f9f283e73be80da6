"""Digests that ranks compare instead of whole plans."""

from __future__ import annotations

from hashlib import blake2b

DIGEST_BYTES = 16


def digest_of(*parts: bytes) -> bytes:
    """Return a 16-byte digest of the concatenated ``parts``, as stored in message headers."""
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()
