"""Header of a batch: its first bytes, which describe the kinds and sizes of the rest.

All packets have the same size, so that receivers need no prior knowledge. A packet holds the
header, the schema if it is new, the values, and the payload if it fits; the rest follows.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from gpudist.batch.packing import batch_error, decode_values, encode_values
from gpudist.checks.digest import DIGEST_BYTES

# Together with gloo's message header, this fills one frame, so that gloo also sends one message.
PACKET_BYTES = 3840
HEADER_BYTES = 64
ALIGNMENT_BYTES = 64

BATCH, ERROR, END = range(3)

_MAGIC = b"GPBT"
_VERSION = 2
_IS_INLINE = 1
# magic, version, kind, flags, zero, checksums of header and values, bytes of schema and of values,
# bytes of the payload, step, digest of the schema, zeros
_FIXED = struct.Struct(f"<4sBBBBIIIIQQ{DIGEST_BYTES}s8s")
_CHECKSUM = struct.Struct("<I")
_CHECKSUM_AT = 8
_MAX_TEXT_BYTES = 2048


def round_up(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment of tensors."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BatchHeader(NamedTuple):
    """Description of a packet's contents.

    Attributes:
        kind: ``BATCH``, ``ERROR`` (the values are the root's exception) or ``END``.
        step: number of packets sent before this one.
        digest: digest of the schema.
        schema_bytes: size of the schema; 0 if the receiver already has it.
        values_bytes, payload_bytes: sizes of the values and of the payload.
        values_checksum: CRC-32 of the values.
        is_inline: whether the payload is in the packet.
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
        """Size of schema and values together."""
        return self.schema_bytes + self.values_bytes

    @property
    def tail_bytes(self) -> int:
        """Size of the part of schema and values that does not fit into the packet."""
        return max(0, HEADER_BYTES + self.facts_bytes - PACKET_BYTES)

    @property
    def payload_at(self) -> int:
        """Offset of an inline payload in the packet."""
        return round_up(HEADER_BYTES + self.facts_bytes)

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
    ) -> BatchHeader:
        """Create a header for values, a schema if it is new, and a payload."""
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
    def unpack(cls, data: bytes) -> BatchHeader:
        """Unpack the result of :meth:`pack`.

        Raises:
            TransportError: if the bytes are not a header of this version.
        """
        if len(data) < HEADER_BYTES:
            raise batch_error(f"its header has {len(data)} bytes, expected {HEADER_BYTES}")
        fields = _FIXED.unpack_from(data)
        magic, version, kind, flags, zero, checksum, values_checksum, *sizes, digest, zeros = fields
        if magic != _MAGIC or version != _VERSION:
            raise batch_error(f"it begins with {data[:5].hex()}, expected version {_VERSION}")
        cleared = bytearray(data[:HEADER_BYTES])
        _CHECKSUM.pack_into(cleared, _CHECKSUM_AT, 0)
        if zlib.crc32(cleared) != checksum:
            raise batch_error("the checksum of its header is wrong")
        schema_bytes, values_bytes, payload_bytes, step = sizes
        header = cls(
            kind, step, digest, schema_bytes, values_bytes, payload_bytes, values_checksum,
            flags == _IS_INLINE,
        )  # fmt: skip
        if kind > END or flags > _IS_INLINE or zero or any(zeros):
            raise batch_error(f"unknown kind {kind} or flags {flags}")
        if header.is_inline and not header.payload_fits:
            raise batch_error(f"{payload_bytes} bytes of payload do not fit into the packet")
        return header


def pack_error(error: BaseException) -> bytes:
    """Encode an exception as values: the name of its type, and its text cut to fit the packet."""
    texts = [
        text.encode("utf-8", "replace")[: _MAX_TEXT_BYTES // 2].decode("utf-8", "ignore")
        for text in (type(error).__name__, str(error))
    ]
    return encode_values(texts)


def unpack_error(values: bytes) -> tuple[str, str]:
    """Decode the result of :func:`pack_error`.

    Raises:
        TransportError: if the bytes do not encode an exception.
    """
    match decode_values(values):
        case (str(name), str(text)):
            return name, text
    raise batch_error("it does not encode an exception")
