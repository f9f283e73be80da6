"""Send a batch between processes of one node, reading tensors in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from gpudist.batch.batch_message import BatchMessage
from gpudist.batch.header import PACKET_BYTES, BatchHeader
from gpudist.batch.leaves import TensorSpec
from gpudist.batch.payload import copy_into
from gpudist.batch.places import Places
from gpudist.batch.prepared import PreparedBatch
from gpudist.transport.base import Signature
from gpudist.world.partition import Partition


class PieceCarrier:
    """Messages from rank ``root`` of ``P`` to all others, with the interface of ``Carrier``.

    Args:
        P: partition over a transport that ``carries_pieces``; includes this worker.
        root: position of the root in ``P``.
        name: name of the operation, on which ranks must agree.
    """

    sends_packed = False

    def __init__(self, P: Partition, root: int, name: str) -> None:
        self._wire = P.wire
        self._is_root = P.rank == root
        others = [rank for position, rank in enumerate(P.ranks) if position != root]
        self._peers = others if self._is_root else [P.ranks[root]]
        self._packet = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        self._packet_bytes = self._packet.numpy()
        self._packet_at = self._packet.data_ptr()
        self._of_packet, self._of_rest, self._of_payload = [
            Signature.of(f"{name}: {what}", P.digest)
            for what in ("packet", "rest of the packet", "payload")
        ]

    def send(self, message: BatchMessage, prepared: PreparedBatch) -> list[torch.Tensor]:
        """Send a batch; return this rank's copies of its tensors. Called by the root."""
        places, copies = prepared.places, prepared.packed
        if prepared.payload is None and not all([_can_be_read(x) for x in prepared.tensors]):
            copies = _copy_tensors(prepared)
        sources = copies or prepared.tensors
        with self._start_packet(message, places, sources):
            self._send_rest(message)
            if message.header.is_inline or not places.nbytes:
                return copies or _copy_tensors(prepared)
            addresses = [x.data_ptr() for x in sources]
            with self._start(self._of_payload, places.pieces(addresses)):
                return copies or _copy_tensors(prepared)

    def say(self, message: BatchMessage) -> None:
        """Send a message without tensors. Called by the root."""
        with self._start_packet(message, Places(()), ()):
            self._send_rest(message)

    def receive_packet(self) -> bytes:
        """Receive the first ``PACKET_BYTES`` bytes of a message. Called by the other ranks."""
        with self._start(self._of_packet, [(self._packet_at, PACKET_BYTES)]):
            pass
        return self._packet_bytes.tobytes()

    def receive_rest(self, nbytes: int) -> bytes:
        """Receive the part of schema and values that does not fit into the packet."""
        rest = torch.empty(nbytes, dtype=torch.uint8)
        with self._start(self._of_rest, [(rest.data_ptr(), nbytes)]):
            pass
        return rest.numpy().tobytes()

    def receive_tensors(
        self, header: BatchHeader, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """Receive the tensors into new memory."""
        places = Places(specs)
        payload, tensors = places.new_tensors(places.nbytes)
        if header.is_inline:
            start = header.payload_at
            payload.copy_(self._packet[start : start + header.payload_bytes])
            return tensors
        if places.nbytes:
            start = payload.data_ptr()
            addresses = [start + offset for offset in places.offsets]
            with self._start(self._of_payload, places.pieces(addresses)):
                pass
        return tensors

    def _start_packet(
        self, message: BatchMessage, places: Places, sources: Sequence[torch.Tensor]
    ) -> AbstractContextManager[None]:
        header = message.header
        first = (header.pack() + message.facts)[:PACKET_BYTES]
        self._packet_bytes[: len(first)] = np.frombuffer(first, np.uint8)
        if not header.is_inline:
            return self._start(self._of_packet, [(self._packet_at, PACKET_BYTES)])
        pieces = [(self._packet_at, header.payload_at)]
        for x, size, room in zip(sources, places.sizes, places.rooms, strict=True):
            # The content of the gaps between tensors is arbitrary.
            pieces += (x.data_ptr(), size), (self._packet_at, room - size)
        pieces.append((self._packet_at, PACKET_BYTES - header.payload_at - places.nbytes))
        return self._start(self._of_packet, pieces)

    def _send_rest(self, message: BatchMessage) -> None:
        nbytes = message.header.tail_bytes
        if nbytes:
            rest = torch.frombuffer(bytearray(message.facts[-nbytes:]), dtype=torch.uint8)
            with self._start(self._of_rest, [(rest.data_ptr(), nbytes)]):
                pass

    def _start(
        self, signature: Signature, pieces: list[tuple[int, int]]
    ) -> AbstractContextManager[None]:
        return self._wire.start_pieces(signature, self._is_root, self._peers, pieces)


def _copy_tensors(prepared: PreparedBatch) -> list[torch.Tensor]:
    _, copies = prepared.places.new_tensors(prepared.places.nbytes)
    copy_into(copies, prepared.tensors)
    return copies


def _can_be_read(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.is_cpu and not x.is_neg() and not x.is_conj()
