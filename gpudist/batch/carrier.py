"""Send a batch as messages: a packet, the rest of the schema and values, and the payload."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from gpudist.batch.batch_message import BatchMessage
from gpudist.batch.header import PACKET_BYTES, BatchHeader
from gpudist.batch.leaves import TensorSpec
from gpudist.batch.places import Places, tensors_in
from gpudist.batch.prepared import PreparedBatch
from gpudist.cache import Cache
from gpudist.errors import GpudistError, PeerFailure
from gpudist.transport.base import Signature
from gpudist.transport.failure.channel import Failure
from gpudist.world.host_channel import host_partition
from gpudist.world.partition import Partition


class Carrier:
    """Messages from rank ``root`` of ``P`` to all others, with all tensors packed into one.

    The constructor is collective over NCCL.

    Args:
        P: partition that includes this worker.
        root: position of the root in ``P``.
        name: name of the operation, on which ranks must agree.
    """

    sends_packed = True

    def __init__(self, P: Partition, root: int, name: str) -> None:
        self._P = P
        self._root = root
        self._name = name
        self._packet = torch.empty(0, dtype=torch.uint8)
        self._host = host_partition(P)
        self._signatures = Cache[tuple[Partition, str], Signature]()

    def send(self, message: BatchMessage, prepared: PreparedBatch) -> list[torch.Tensor]:
        """Send a batch; return this rank's copies of its tensors. Called by the root."""
        header, packet = message.header, packet_of(message)
        if header.is_inline and prepared.payload is not None:
            start, count = header.payload_at, header.payload_bytes
            packet[start : start + count] = prepared.payload[:count]
        self._broadcast(self._host, "packet", packet)
        self._send_rest(message)
        payload, tensors = self._on_device(prepared)
        if payload.numel() and not header.is_inline:
            self._broadcast(self._P, "payload", payload)
        return tensors

    def receive_packet(self) -> bytes:
        """Receive the first ``PACKET_BYTES`` bytes of a message. Called by the other ranks."""
        self._packet = torch.empty(PACKET_BYTES, dtype=torch.uint8)
        self._broadcast(self._host, "packet", self._packet)
        return self._packet.numpy().tobytes()

    def receive_rest(self, nbytes: int) -> bytes:
        """Receive the part of schema and values that does not fit into the packet."""
        rest = torch.empty(nbytes, dtype=torch.uint8)
        self._broadcast(self._host, "rest", rest)
        return rest.numpy().tobytes()

    def receive_tensors(
        self, header: BatchHeader, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """Receive the tensors on ``P``'s device; over NCCL in stream order."""
        payload, tensors = Places(specs).new_tensors(self._P.device)
        if header.is_inline:
            start, count = header.payload_at, header.payload_bytes
            payload.copy_(self._packet[start : start + count], non_blocking=True)
        elif header.payload_bytes:
            self._broadcast(self._P, "payload", payload)
        return tensors

    def _send_rest(self, message: BatchMessage) -> None:
        nbytes = message.header.tail_bytes
        if nbytes:
            self._broadcast(self._host, "rest", bytes_tensor(message.facts[-nbytes:]))

    def _on_device(self, prepared: PreparedBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the payload on the partition's device, and the tensors in it."""
        device = self._P.device
        if prepared.payload is None:
            return prepared.places.copy(device)
        if prepared.payload.device == device:
            return prepared.payload, prepared.packed
        payload = prepared.payload.to(device, non_blocking=True)
        return payload, tensors_in(prepared.tensors, payload)

    def _broadcast(self, P: Partition, what: str, data: torch.Tensor) -> None:
        if P.size > 1:
            with self._failing_together(P), P.wire.group(self._signature(P, what)):
                P.communicator.broadcast(data, self._root)

    def _signature(self, P: Partition, what: str) -> Signature:
        return self._signatures.get_or_make(
            (P, what), lambda: Signature.of(f"{self._name}: {what}", P.digest)
        )

    @contextmanager
    def _failing_together(self, P: Partition) -> Generator[None, None, None]:
        """Abort the partition's transport if the host transport fails and is a different one."""
        try:
            yield
        except GpudistError as error:
            if P.wire is self._P.wire:
                raise
            if isinstance(error, PeerFailure) and error.rank is not None:
                rank = self._P.ranks[error.rank]
                error = PeerFailure(f"world rank {rank}: {error}", rank)
            self._P.wire.abort(Failure.from_exception(error, self._P.wire.rank))
            raise error from None


def packet_of(message: BatchMessage) -> torch.Tensor:
    """Return a new packet with a message's header, schema and values, as far as they fit."""
    first = (message.header.pack() + message.facts)[:PACKET_BYTES]
    return bytes_tensor(first.ljust(PACKET_BYTES, b"\0"))


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
