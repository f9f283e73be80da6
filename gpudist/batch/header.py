"""Header of a batch: its first bytes, which describe the kinds and sizes of the rest.

All packets have the same size, so that receivers need no prior knowledge. A packet holds the
header, the schema if it is new, the values, and the payload if it fits; the rest follows.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from gpudist.batch.packing import batch_error
from gpudist.checks.digest import DIGEST_BYTES

# Together with gloo's message header, this fills one frame, so that gloo also sends one message.
PACKET_BYTES = 3840
HEADER_BYTES = 64
ALIGNMENT_BYTES = 64

_MAGIC = b"GPBT"
_VERSION = 3
# magic, version, the fields of a header, zeros; then the checksum of these
_FIXED = struct.Struct(f"<4sB??xIIIQQ{DIGEST_BYTES}s8x")


def round_up(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment of tensors."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BatchHeader(NamedTuple):
    """Description of a packet's contents.

    Attributes:
        is_error: whether the batch is the name and the text of an exception of the root.
        is_inline: whether the payload is in the packet.
        values_checksum: CRC-32 of the values.
        schema_bytes: size of the schema; 0 if the receiver already has it.
        values_bytes, payload_bytes: sizes of the values and of the payload.
        step: number of packets sent before this one.
        digest: digest of the schema.
    """

    is_error: bool
    is_inline: bool
    values_checksum: int
    schema_bytes: int
    values_bytes: int
    payload_bytes: int
    step: int
    digest: bytes

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
        step: int,
        values: bytes,
        digest: bytes,
        schema: bytes,
        payload_bytes: int = 0,
        is_error: bool = False,
        may_be_inline: bool = False,
    ) -> BatchHeader:
        """Create a header for values, a schema if it is new, and a payload."""
        checksum = zlib.crc32(values)
        sizes = len(schema), len(values), payload_bytes
        header = cls(is_error, False, checksum, *sizes, step, digest)
        return header._replace(is_inline=may_be_inline and header.payload_fits)

    def pack(self) -> bytes:
        packed = _FIXED.pack(_MAGIC, _VERSION, *self)
        return packed + zlib.crc32(packed).to_bytes(HEADER_BYTES - len(packed), "little")

    @classmethod
    def unpack(cls, data: bytes) -> BatchHeader:
        """Unpack the result of :meth:`pack`.

        Raises:
            TransportError: if the bytes are not a header of this version.
        """
        if len(data) < HEADER_BYTES:
            raise batch_error(f"its header has {len(data)} bytes, expected {HEADER_BYTES}")
        magic, version, *fields = _FIXED.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise batch_error(f"it begins with {data[:5].hex()}, expected version {_VERSION}")
        header = cls(*fields)
        if header.pack() != data[:HEADER_BYTES]:
            raise batch_error("the checksum of its header is wrong")
        if header.is_inline and not header.payload_fits:
            raise batch_error(f"{header.payload_bytes} bytes of payload do not fit into the packet")
        return header
