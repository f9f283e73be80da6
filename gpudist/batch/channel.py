"""The batches of one rank, sent to the others one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.batch.carrier import Carrier
from gpudist.batch.differentiable import move_differentiable
from gpudist.batch.flattener import Flattener
from gpudist.batch.header import END, ERROR, HEADER_BYTES, Header, unpack_error
from gpudist.batch.message import (
    KnownSchemas,
    Message,
    batch_message,
    end_message,
    error_message,
    understand,
    values_of,
)
from gpudist.batch.piece_carrier import PieceCarrier, can_carry_pieces
from gpudist.batch.prepared import Prepared, prepare
from gpudist.batch.reading import malformed
from gpudist.batch.schema import Schema
from gpudist.errors import GpudistError, PartitionError, RemoteError
from gpudist.ops.agreement import refuse
from gpudist.ops.operator import require_cartesian
from gpudist.world.partition import CartesianPartition, Partition


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
        make_carrier = PieceCarrier if can_carry_pieces(P) else Carrier
        name = f"{name}(root={root}, differentiable={differentiable})"
        self._carrier = make_carrier(P, root, name)
        self._flattener = Flattener(differentiable)
        self._step = 0
        self._known = KnownSchemas()

    def prepare(self, batch: Any) -> Prepared:
        """Make ``batch`` ready to be sent at once. By the root.

        Raises:
            ShapeError, TransportError: something in it cannot be sent.
        """
        packs = self._carrier.sends_packed
        return prepare(batch, self.P.device, self._flattener, ahead=False, packs=packs)

    def send(self, prepared: Prepared) -> Any:
        """Send a batch; returns this rank's copy of it. By the root."""
        message = batch_message(prepared, self._known, self._step)
        self._step += 1
        constants = self._carrier.send(message, prepared)
        return self._finished(prepared.schema, prepared.parts, constants)

    def send_end(self) -> None:
        """Say that there are no more batches."""
        self._say(end_message(self._step))

    def send_error(self, error: BaseException) -> None:
        """Say what this rank raised in place of a batch."""
        self._say(error_message(error, self._step))

    def receive(self) -> Any:
        """The root's next batch. By the other ranks.

        Raises:
            StopIteration: the root has no more.
            RemoteError: the root raised in place of it.
            TransportError: what came is no batch, or has a class that this process does not have.
        """
        packet = self._carrier.receive_packet()
        try:
            message = self._opened(packet)
            if message.header.kind in (END, ERROR):
                self._raise_what_root_did(message)
            schema, parts = understand(message, self._known, self._differentiable)
        except (RemoteError, StopIteration):
            raise
        except GpudistError as error:
            refuse(self.P, error)
        constants = self._carrier.receive_tensors(message.header, schema.constants(parts))
        return self._finished(schema, parts, constants)

    def _say(self, message: Message) -> None:
        self._step += 1
        self._carrier.say(message)

    def _opened(self, packet: bytes) -> Message:
        """The message that begins in ``packet``."""
        header = Header.unpack(packet)
        if header.step != self._step:
            raise malformed(f"it is number {header.step}, where {self._step} was due")
        self._step += 1
        facts = packet[HEADER_BYTES : HEADER_BYTES + header.facts_bytes]
        if header.tail_bytes:
            facts += self._carrier.receive_rest(header.tail_bytes)
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
