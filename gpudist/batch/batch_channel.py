"""Channel that sends the batches of one rank to the others, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from gpudist.batch.batch_message import BatchMessage, KnownSchemas, batch_message, understand
from gpudist.batch.carrier import Carrier
from gpudist.batch.differentiable import move_differentiable
from gpudist.batch.header import HEADER_BYTES, BatchHeader
from gpudist.batch.packing import batch_error
from gpudist.batch.piece_carrier import PieceCarrier
from gpudist.batch.prepared import PreparedBatch, prepare
from gpudist.batch.schema import Schema
from gpudist.errors import GpudistError, PartitionError, RemoteError
from gpudist.ops.operator import require_cartesian
from gpudist.ops.shape_agreement import refuse
from gpudist.world.partition import CartesianPartition, Partition

# Number of characters of an exception's text that are sent.
_MAX_TEXT = 1000


class BatchChannel:
    """Channel for batches from rank ``root`` of ``P`` to its other ranks.

    The constructor is collective over NCCL.

    Args:
        P: partition that includes this worker.
        root: position in ``P`` of the rank that has the batches.
        name: name of the operation, part of what ranks must agree on.
        differentiable: whether autograd moves tensors that require grad; the same on all ranks.
    """

    def __init__(self, P: Partition, root: int, name: str, differentiable: bool = False) -> None:
        self.P = P
        self.is_root = P.rank == root
        self._root = root
        self._differentiable = differentiable
        make_carrier = PieceCarrier if P.wire.carries_pieces and P.size > 1 else Carrier
        name = f"{name}(root={root}, differentiable={differentiable})"
        self._carrier = make_carrier(P, root, name)
        self._step = 0
        self._known = KnownSchemas()

    def prepare(self, batch: Any) -> PreparedBatch:
        """Flatten ``batch``, so that it can be sent at once. Called by the root.

        Raises:
            ShapeError, TransportError: if something in the batch cannot be sent.
        """
        packs = self._carrier.sends_packed
        return prepare(batch, self.P.device, self._differentiable, ahead=False, packs=packs)

    def send(self, prepared: PreparedBatch, is_error: bool = False) -> Any:
        """Send a batch; return this rank's copy of it. Called by the root."""
        message = batch_message(prepared, self._known, self._step, is_error)
        self._step += 1
        constants = self._carrier.send(message, prepared)
        return self._rebuild(prepared.schema, prepared.parts, constants)

    def send_error(self, error: BaseException) -> None:
        """Send the exception that this rank raised in place of a batch."""
        texts = type(error).__name__, str(error)[:_MAX_TEXT]
        self.send(self.prepare(texts), is_error=True)

    def receive(self) -> Any:
        """Receive the root's next batch. Called by the other ranks.

        Raises:
            StopIteration: if the root raised it: it has no more batches.
            RemoteError: if the root raised an exception in place of a batch.
            TransportError: if the message is not a batch, or contains a class that this process
                does not have.
        """
        packet = self._carrier.receive_packet()
        try:
            message = self._open_message(packet)
            schema, parts = understand(message, self._known, self._differentiable)
        except GpudistError as error:
            refuse(self.P, error)
        constants = self._carrier.receive_tensors(message.header, schema.constants(parts))
        batch = self._rebuild(schema, parts, constants)
        if message.header.is_error:
            self._raise_what_root_did(batch)
        return batch

    def _open_message(self, packet: bytes) -> BatchMessage:
        """Unpack the message that begins in ``packet``, and receive its remainder."""
        header = BatchHeader.unpack(packet)
        if header.step != self._step:
            raise batch_error(f"it is message {header.step}, expected message {self._step}")
        self._step += 1
        facts = packet[HEADER_BYTES : HEADER_BYTES + header.facts_bytes]
        if header.tail_bytes:
            facts += self._carrier.receive_rest(header.tail_bytes)
        return BatchMessage(header, facts)

    def _raise_what_root_did(self, batch: Any) -> NoReturn:
        match batch:
            case ("StopIteration", str()):
                raise StopIteration
            case (str(kind), str(text)):
                text = f"rank {self._root} of {self.P!r} raised {kind} in place of a batch: {text}"
                raise RemoteError(text, self._root, kind)
        refuse(self.P, batch_error("it does not name an exception"))

    def _rebuild(self, schema: Schema, parts: list[Any], constants: list[torch.Tensor]) -> Any:
        differentiable = schema.differentiable(parts)
        if differentiable:
            tensors = differentiable if self.is_root else None
            differentiable = move_differentiable(differentiable, tensors, self.P, self._root)
        try:
            return schema.build(parts, constants, differentiable)
        except GpudistError as error:
            refuse(self.P, error)


def channel_of(
    name: str, P: Partition, root: int, axes: Sequence[int] | None, differentiable: bool = False
) -> BatchChannel | None:
    """Return the channel of this worker's line along ``axes``, or of ``P`` without ``axes``.

    Later calls return the same channel. The result is ``None`` for a worker outside ``P``.

    Raises:
        PartitionError: if ``root`` or ``axes`` do not exist in ``P``.
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
    channel = P.wire.remembered.get(key)
    if not isinstance(channel, BatchChannel):
        channel = P.wire.remembered[key] = BatchChannel(group, root, name, differentiable)
    return channel
