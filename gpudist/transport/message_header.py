"""Header that is sent with every message between two ranks.

It turns a disagreement between ranks into an error that shows both views. Without it, ranks would
receive wrong numbers, hang, or crash.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gpudist.errors import PlanMismatch, TransportError
from gpudist.transport.base import Signature

HEADER_BYTES = 256

_MAGIC = b"GPUD"
_VERSION = 2
# magic, version, bytes of the label, sequence number, bytes of the payload, digest, given
_FIXED = struct.Struct("<4sHHQQ16sQ")
_LABEL_BYTES = HEADER_BYTES - _FIXED.size


@dataclass(frozen=True)
class MessageHeader:
    """Header of a message, as seen by one side.

    Attributes:
        sequence: number of the message among those from the same sender to the same receiver.
        nbytes: size of the payload, in bytes.
        digest: 16 bytes that identify the operation.
        label: description of the operation, truncated to fit; not compared.
        given: what the networks of both ranks were given and did before, see
            :meth:`~gpudist.transport.Transport.fold`.
    """

    sequence: int
    nbytes: int
    digest: bytes
    label: str
    given: int = 0

    @classmethod
    def of(cls, signature: Signature, sequence: int, nbytes: int, given: int) -> MessageHeader:
        return cls(sequence, nbytes, signature.digest, signature.label, given)

    def pack(self) -> bytes:
        """Serialize the header to exactly ``HEADER_BYTES`` bytes."""
        label = self.label.encode()[:_LABEL_BYTES]
        fixed = _FIXED.pack(
            _MAGIC, _VERSION, len(label), self.sequence, self.nbytes, self.digest, self.given
        )
        return (fixed + label).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> MessageHeader:
        """Deserialize a header written by :meth:`pack`.

        Raises:
            TransportError: the bytes are not a header of this version.
        """
        if len(data) < _FIXED.size:
            raise TransportError(
                f"received a header of {len(data)} bytes; it must have {HEADER_BYTES}"
            )
        magic, version, length, sequence, nbytes, digest, given = _FIXED.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise TransportError(
                f"received {data[:6].hex()} where a message of gpudist's wire version {_VERSION} "
                f"should begin; run the same gpudist on every rank"
            )
        label = data[_FIXED.size : _FIXED.size + length]
        # The label may be truncated in the middle of a character.
        return cls(sequence, nbytes, digest, label.decode(errors="ignore"), given)

    def words(self) -> str:
        return (
            f"message {self.sequence} of {self.nbytes} bytes for '{self.label}' "
            f"(plan {self.digest.hex()[:8]})"
        )

    def verify(
        self, received: MessageHeader, receiver: int, sender: int, last_given: str = ""
    ) -> None:
        """Compare this header, expected by ``receiver``, with the one received from ``sender``.

        Raises:
            PlanMismatch: operation, order or size differ; the message shows both views. Or what
                networks were given differs, at the latest in ``last_given``.
        """
        same_operation = self.digest == received.digest
        if same_operation and self.sequence == received.sequence and self.nbytes == received.nbytes:
            if self.given == received.given:
                return
            raise PlanMismatch(
                f"ranks disagree about what networks were given or did: ranks {receiver} and "
                f"{sender}, at the latest in {last_given}, found by {self.words()}\n"
                "numbers and small CPU tensors given whole, modes, rates and functions must be "
                "equal on every worker; GPUDIST_CHECK=1 names the first that differs"
            )
        what = "the size of a message" if same_operation else "the operation"
        raise PlanMismatch(
            f"ranks disagree about {what}:\n"
            f"  rank {receiver} expected from rank {sender}: {self.words()}\n"
            f"  rank {sender} sent to rank {receiver}: {received.words()}\n"
            f"call the same operations with the same shapes in the same order on every rank"
        )
