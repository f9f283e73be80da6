"""Send a batch as messages: a packet, the rest of the schema and values, and the payload."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from gpudist.batch.batch_message import BatchMessage
from gpudist.batch.header import HEADER_BYTES, PACKET_BYTES, BatchHeader
from gpudist.batch.leaves import TensorSpec
from gpudist.batch.payload import message_bytes, new_payload, pack
from gpudist.batch.places import tensors_in
from gpudist.batch.prepared import PreparedBatch
from gpudist.cache import Cache
from gpudist.errors import GpudistError, PeerFailure
from gpudist.exchange import Movement, bind, carry_out
from gpudist.geometry.broadcasting import Pairing
from gpudist.ops.broadcast import plan_between
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
        self._movements = Cache[tuple[Partition, int], Movement]()
        self._host = host_partition(P)

    def send(self, message: BatchMessage, prepared: PreparedBatch) -> list[torch.Tensor]:
        """Send a batch; return this rank's copies of its tensors. Called by the root."""
        self.say(message, prepared.payload)
        payload, tensors = self._on_device(prepared)
        if payload.numel() and not message.header.is_inline:
            self._broadcast(self._P, payload, payload.numel())
        return tensors

    def say(self, message: BatchMessage, payload: torch.Tensor | None = None) -> None:
        """Send header, schema and values, and the payload if it is inline. Called by the root."""
        if self._P.size == 1:
            return
        header, facts = message.header, message.facts
        packet = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        first = header.pack() + facts[: PACKET_BYTES - HEADER_BYTES]
        packet[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        if header.is_inline and payload is not None:
            start, count = header.payload_at, header.payload_bytes
            packet[start : start + count] = payload[:count]
        self._broadcast(self._host, packet, PACKET_BYTES)
        if header.tail_bytes:
            rest = bytearray(facts[-header.tail_bytes :])
            self._broadcast_rest(torch.frombuffer(rest, dtype=torch.uint8))

    def receive_packet(self) -> bytes:
        """Receive the first ``PACKET_BYTES`` bytes of a message. Called by the other ranks."""
        self._packet = self._broadcast(self._host, None, PACKET_BYTES)
        return self._packet.numpy().tobytes()

    def receive_rest(self, nbytes: int) -> bytes:
        """Receive the part of schema and values that does not fit into the packet."""
        rest = torch.empty(nbytes, dtype=torch.uint8)
        self._broadcast_rest(rest)
        return rest.numpy().tobytes()

    def receive_tensors(
        self, header: BatchHeader, specs: Sequence[TensorSpec]
    ) -> list[torch.Tensor]:
        """Receive the tensors on ``P``'s device; over NCCL in stream order."""
        device = self._P.device
        if header.is_inline:
            payload = self._packet[header.payload_at :].to(device, non_blocking=True)
        elif header.payload_bytes:
            payload = self._broadcast(self._P, None, message_bytes(header.payload_bytes))
        else:
            payload = new_payload(0, device)
        return tensors_in(specs, payload)

    def _on_device(self, prepared: PreparedBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the payload on the partition's device, and the tensors in it."""
        device = self._P.device
        if prepared.payload is None:
            payload = new_payload(message_bytes(prepared.payload_bytes), device)
            return payload, pack(prepared.tensors, payload)
        if prepared.payload.device == device:
            return prepared.payload, prepared.packed
        payload = prepared.payload.to(device, non_blocking=True)
        return payload, tensors_in(prepared.tensors, payload)

    def _broadcast_rest(self, rest: torch.Tensor) -> None:
        signature = self._signature(self._host, f"rest of {rest.numel()} bytes")
        with self._failing_together(self._host), self._host.wire.group(signature):
            self._host.communicator.broadcast(rest, self._root)

    def _broadcast(self, P: Partition, data: torch.Tensor | None, nbytes: int) -> torch.Tensor:
        """Broadcast the root's ``nbytes`` bytes; ``data`` is ``None`` on the other ranks."""
        if P.size == 1:
            assert data is not None
            return data
        if P.wire.has_streams:
            return self._broadcast_on_device(P, data, nbytes)
        with self._failing_together(P):
            movement = self._movement(P, nbytes)
            x = data if data is not None else torch.empty(0, dtype=torch.uint8)
            (y,) = carry_out((movement,), (x,))
        return data if data is not None else y

    def _broadcast_on_device(
        self, P: Partition, data: torch.Tensor | None, nbytes: int
    ) -> torch.Tensor:
        # Sent in stream order and without a plan, because binding a plan would wait for other
        # ranks.
        payload = data if data is not None else new_payload(nbytes, P.device)
        with P.wire.group(self._signature(P, f"payload of {nbytes} bytes")):
            P.communicator.broadcast(payload, self._root)
        return payload

    def _movement(self, P: Partition, nbytes: int) -> Movement:
        return self._movements.get_or_make((P, nbytes), lambda: self._bind_broadcast(P, nbytes))

    def _bind_broadcast(self, P: Partition, nbytes: int) -> Movement:
        P_root = P.create_partition_inclusive([self._root])
        P_others = P.create_partition_inclusive([r for r in range(P.size) if r != self._root])
        P_all = P.create_partition_inclusive(range(P.size))
        plan = plan_between(
            P_root, P_others, P_all, Pairing((1,), P_others.shape), lambda _: (nbytes,),
            (self._name, nbytes),
        )  # fmt: skip
        return bind(plan, P_all, self._name, torch.uint8, (0,), torch.uint8)

    def _signature(self, P: Partition, what: str) -> Signature:
        return Signature.of(f"{self._name}: {what}", P.digest)

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
