"""The first bytes of every batch: what it is, and how much of it follows.

A packet has one size, so that a receiver need know nothing to receive it. It holds the header, then
the schema if it is new, the values, and the payload if it fits. What does not fit follows.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from gpudist.batch.reading import Reader, malformed, write_text
from gpudist.checks.digest import DIGEST_BYTES

# With the header of gloo's messages it fills their one frame, and goes as one message there too.
PACKET_BYTES = 3840
HEADER_BYTES = 64
ALIGNMENT_BYTES = 64

BATCH, ERROR, END = range(3)

_MAGIC = b"GPBT"
_VERSION = 1
_IS_INLINE = 1
# magic, version, kind, flags, zero, checksums of header and values, bytes of schema and of values,
# bytes of the payload, step, digest of the schema, zeros
_FIXED = struct.Struct(f"<4sBBBBIIIIQQ{DIGEST_BYTES}s8s")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = 8
_MAX_TEXT_BYTES = 2048


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to where a tensor may begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Header(NamedTuple):
    """What a packet says of itself.

    Attributes:
        kind: ``BATCH``, ``ERROR`` (the values are the root's exception) or ``END``.
        step: how many packets went before.
        digest: of the schema.
        schema_bytes: 0 where the receiver has had the schema before.
        values_bytes, payload_bytes: of what follows.
        values_checksum: CRC-32 of the values.
        is_inline: the payload is in the packet.
    """

    kind: int
    step: int
    digest: bytes = bytes(DIGEST_BYTES)
    schema_bytes: int = 0
    values_bytes: int = 0
    payload_bytes: int = 0
    values_checksum: int = 0
    is_inline: bool = False

    @property
    def facts_bytes(self) -> int:
        """Of schema and values together."""
        return self.schema_bytes + self.values_bytes

    @property
    def tail_bytes(self) -> int:
        """Of schema and values that have no room in the packet."""
        return max(0, HEADER_BYTES + self.facts_bytes - PACKET_BYTES)

    @property
    def payload_at(self) -> int:
        """Where in the packet the payload begins, if it is there."""
        return aligned(HEADER_BYTES + self.facts_bytes)

    @property
    def payload_fits(self) -> bool:
        return self.payload_at + self.payload_bytes <= PACKET_BYTES

    @classmethod
    def of(
        cls,
        kind: int,
        step: int,
        values: bytes,
        digest: bytes = bytes(DIGEST_BYTES),
        schema: bytes = b"",
        payload_bytes: int = 0,
        may_be_inline: bool = False,
    ) -> Header:
        """The header of these values, of a schema if it is new, and of a payload."""
        header = cls(
            kind, step, digest, len(schema), len(values), payload_bytes, zlib.crc32(values)
        )
        if may_be_inline and header.payload_fits:
            header = header._replace(is_inline=True)
        return header

    def pack(self) -> bytes:
        flags = _IS_INLINE * self.is_inline
        packed = bytearray(
            _FIXED.pack(
                _MAGIC, _VERSION, self.kind, flags, 0, 0, self.values_checksum, self.schema_bytes,
                self.values_bytes, self.payload_bytes, self.step, self.digest, bytes(8),
            )
        )  # fmt: skip
        _CHECKSUM.pack_into(packed, _CHECKSUM_AT, zlib.crc32(packed))
        return bytes(packed)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Read what :meth:`pack` wrote.

        Raises:
            TransportError: these are not the bytes of a header of this version.
        """
        if len(data) < HEADER_BYTES:
            raise malformed(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
        fields = _FIXED.unpack_from(data)
        magic, version, kind, flags, zero, checksum, values_checksum, *sizes, digest, zeros = fields
        if magic != _MAGIC or version != _VERSION:
            raise malformed(f"it begins with {data[:5].hex()}, not with version {_VERSION} of one")
        cleared = bytearray(data[:HEADER_BYTES])
        _CHECKSUM.pack_into(cleared, _CHECKSUM_AT, 0)
        if zlib.crc32(cleared) != checksum:
            raise malformed("the checksum of its header is wrong")
        schema_bytes, values_bytes, payload_bytes, step = sizes
        header = cls(
            kind, step, digest, schema_bytes, values_bytes, payload_bytes, values_checksum,
            flags == _IS_INLINE,
        )  # fmt: skip
        if kind > END or flags > _IS_INLINE or zero or any(zeros):
            raise malformed(f"its kind is {kind} and its flags are {flags}")
        if header.is_inline and not header.payload_fits:
            raise malformed(f"{payload_bytes} bytes of payload have no room in it")
        return header

    def check_values(self, values: bytes) -> None:
        if zlib.crc32(values) != self.values_checksum:
            raise malformed("the checksum of its values is wrong")


def pack_error(error: BaseException) -> bytes:
    """An exception as values: the name of its type, and its text cut to fit the packet."""
    out = bytearray()
    for text in (type(error).__name__, str(error)):
        cut = text.encode("utf-8", "replace")[: _MAX_TEXT_BYTES // 2]
        write_text(out, cut.decode("utf-8", "ignore"))
    return bytes(out)


def unpack_error(values: bytes) -> tuple[str, str]:
    """What :func:`pack_error` wrote.

    Raises:
        TransportError: these bytes are none.
    """
    reader = Reader(values)
    name, text = reader.text(), reader.text()
    reader.finish()
    return name, text
