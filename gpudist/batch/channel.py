"""The batches of one rank, sent to the others one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.batch.carrier import Carrier, message_bytes
from gpudist.batch.differentiable import move_differentiable
from gpudist.batch.header import END, ERROR, HEADER_BYTES, PACKET_BYTES, Header, unpack_error
from gpudist.batch.message import (
    KnownSchemas,
    Message,
    batch_message,
    end_message,
    error_message,
    understand,
    values_of,
)
from gpudist.batch.payload import new_payload, pack, unpack
from gpudist.batch.prepared import Prepared
from gpudist.batch.reading import malformed
from gpudist.batch.schema import Schema
from gpudist.errors import GpudistError, PartitionError, RemoteError
from gpudist.ops.agreement import refuse
from gpudist.ops.operator import require_cartesian
from gpudist.partition import CartesianPartition, Partition


class BatchChannel:
    """Batches from rank ``root`` of ``P`` to its other ranks. Making it is collective over NCCL.

    Args:
        P: this worker is a member.
        root: position in ``P`` of the rank that has the batches.
        name: the operation; part of what ranks must agree on.
        differentiable: tensors that require grad are moved by autograd; the same on all ranks.
    """

    def __init__(self, P: Partition, root: int, name: str, differentiable: bool = False) -> None:
        self.P = P
        self.is_root = P.rank == root
        self._root = root
        self._differentiable = differentiable
        self._carrier = Carrier(P, root, f"{name}(root={root}, differentiable={differentiable})")
        self._step = 0
        self._known = KnownSchemas()

    def send(self, prepared: Prepared) -> Any:
        """Send a batch; returns this rank's copy of it. By the root."""
        message = batch_message(prepared, self._known, self._step)
        self._send(message, prepared.payload)
        payload, constants = self._on_device(prepared)
        if payload.numel() and not message.header.is_inline:
            self._carrier.payload(payload, payload.numel())
        return self._finished(prepared.schema, prepared.parts, constants)

    def send_end(self) -> None:
        """Say that there are no more batches."""
        self._send(end_message(self._step), None)

    def send_error(self, error: BaseException) -> None:
        """Say what this rank raised in place of a batch."""
        self._send(error_message(error, self._step), None)

    def receive(self) -> Any:
        """The root's next batch. By the other ranks.

        Raises:
            StopIteration: the root has no more.
            RemoteError: the root raised in place of it.
            TransportError: what came is no batch, or has a class that this process does not have.
        """
        packet = self._carrier.packet(None)
        try:
            message = self._opened(packet)
            if message.header.kind in (END, ERROR):
                self._raise_what_root_did(message)
            schema, parts = understand(message, self._known, self._differentiable)
        except (RemoteError, StopIteration):
            raise
        except GpudistError as error:
            refuse(self.P, error)
        payload = self._received_payload(message.header, packet)
        return self._finished(schema, parts, unpack(schema.constants(parts), payload))

    def _send(self, message: Message, payload: torch.Tensor | None) -> None:
        self._step += 1
        if self.P.size == 1:
            return
        header, facts = message.header, message.facts
        packet = torch.zeros(PACKET_BYTES, dtype=torch.uint8)
        first = header.pack() + facts[: PACKET_BYTES - HEADER_BYTES]
        packet[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        if header.is_inline and payload is not None:
            start, count = header.payload_at, header.payload_bytes
            packet[start : start + count] = payload[:count]
        self._carrier.packet(packet)
        if header.tail_bytes:
            tail = torch.frombuffer(bytearray(facts[-header.tail_bytes :]), dtype=torch.uint8)
            self._carrier.tail(tail)

    def _opened(self, packet: torch.Tensor) -> Message:
        """The message that begins in ``packet``."""
        data = packet.numpy().tobytes()
        header = Header.unpack(data)
        if header.step != self._step:
            raise malformed(f"it is number {header.step}, where {self._step} was due")
        self._step += 1
        facts = data[HEADER_BYTES : HEADER_BYTES + header.facts_bytes]
        if header.tail_bytes:
            tail = torch.empty(header.tail_bytes, dtype=torch.uint8)
            self._carrier.tail(tail)
            facts += tail.numpy().tobytes()
        return Message(header, facts)

    def _raise_what_root_did(self, message: Message) -> None:
        values = values_of(message)
        if message.header.kind == END:
            raise StopIteration
        kind, text = unpack_error(values)
        raise RemoteError(
            f"rank {self._root} of {self.P!r} raised {kind} in place of a batch: {text}",
            self._root,
            kind,
        )

    def _received_payload(self, header: Header, packet: torch.Tensor) -> torch.Tensor:
        if header.is_inline:
            return packet[header.payload_at :].to(self.P.device, non_blocking=True)
        if not header.payload_bytes:
            return new_payload(0, self.P.device)
        return self._carrier.payload(None, message_bytes(header.payload_bytes))

    def _on_device(self, prepared: Prepared) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The payload where the partition's tensors live, and the tensors in it."""
        constants = prepared.schema.constants(prepared.parts)
        if prepared.payload is None:
            payload = new_payload(message_bytes(prepared.payload_bytes), self.P.device)
            return payload, pack(constants, payload)
        if prepared.payload.device == self.P.device:
            return prepared.payload, prepared.packed
        payload = prepared.payload.to(self.P.device, non_blocking=True)
        return payload, unpack(constants, payload)

    def _finished(self, schema: Schema, parts: list[Any], constants: list[torch.Tensor]) -> Any:
        """The batch, once the tensors that autograd moves have come too."""
        differentiable = schema.differentiable(parts)
        if differentiable:
            tensors = differentiable if self.is_root else None
            differentiable = move_differentiable(differentiable, tensors, self.P, self._root)
        return schema.build(parts, constants, differentiable)


def channel_of(
    name: str, P: Partition, root: int, axes: Sequence[int] | None, differentiable: bool = False
) -> BatchChannel | None:
    """The channel of this worker's line along ``axes``, or of ``P``: the same one at every call.

    ``None`` for a worker outside ``P``.

    Raises:
        PartitionError: ``root`` or ``axes`` are not of ``P``.
    """
    group = P
    if axes is not None:
        require_cartesian(name, P)
        assert isinstance(P, CartesianPartition)
        group = P.along(axes)
    if not 0 <= root < group.size:
        raise PartitionError(
            f"{name}: root {root} is not one of 0 to {group.size - 1} of {group!r}"
        )
    if not group.active:
        return None
    key = (BatchChannel, name, group, root, differentiable)
    found = P.wire.remembered.get(key)
    if not isinstance(found, BatchChannel):
        found = P.wire.remembered[key] = BatchChannel(group, root, name, differentiable)
    return found
