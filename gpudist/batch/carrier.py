"""The messages a batch goes in: a packet and what it has no room for, by the host; the payload."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from gpudist.batch.header import ALIGNMENT_BYTES, PACKET_BYTES
from gpudist.batch.payload import new_payload
from gpudist.errors import GpudistError, PeerFailure
from gpudist.exchange import Movement, bind, carry_out
from gpudist.geometry.broadcasting import Pairing
from gpudist.host_channel import host_partition
from gpudist.ops.broadcast import plan_between
from gpudist.partition import Partition
from gpudist.transport.base import Failure, Signature

_REMEMBERED = 256
# Payloads are rounded up to one of this many sizes between a power of two and the next, each of
# which is planned once, however the lengths change.
_SIZES_PER_OCTAVE = 8


class Carrier:
    """Broadcasts of bytes from rank ``root`` of ``P``. Making it is collective over NCCL.

    Every method takes the bytes on the root and ``None`` elsewhere, and returns them everywhere.

    Args:
        P: this worker is a member.
        root: position in ``P``.
        name: the operation, on which ranks must agree.
    """

    def __init__(self, P: Partition, root: int, name: str) -> None:
        self._P = P
        self._root = root
        self._name = name
        self._movements: dict[tuple[Partition, int], Movement] = {}
        self._host = host_partition(P)

    def packet(self, data: torch.Tensor | None) -> torch.Tensor:
        """The first message, of ``PACKET_BYTES`` bytes, for the host to read."""
        return self._broadcast(self._host, data, PACKET_BYTES)

    def payload(self, data: torch.Tensor | None, nbytes: int) -> torch.Tensor:
        """Tensors, where ``P``'s live; over NCCL in stream order."""
        return self._broadcast(self._P, data, nbytes)

    def tail(self, tail: torch.Tensor) -> None:
        """What of a message has no room in its packet; received in place."""
        signature = self._signature(self._host, f"rest of {tail.numel()} bytes")
        with self._failing_together(self._host), self._host.wire.group(signature):
            self._host.communicator.broadcast(tail, self._root)

    def _broadcast(self, P: Partition, data: torch.Tensor | None, nbytes: int) -> torch.Tensor:
        """The root's ``nbytes`` bytes, on every rank; ``data`` is ``None`` on the others."""
        if P.size == 1:
            assert data is not None
            return data
        if P.transport == "nccl":
            return self._broadcast_on_device(P, data, nbytes)
        with self._failing_together(P):
            movement = self._movement(P, nbytes)
            x = data if data is not None else torch.empty(0, dtype=torch.uint8)
            (y,) = carry_out((movement,), (x,))
        return data if data is not None else y

    def _broadcast_on_device(
        self, P: Partition, data: torch.Tensor | None, nbytes: int
    ) -> torch.Tensor:
        """In stream order, without a plan: binding one would wait for the others."""
        payload = data if data is not None else new_payload(nbytes, P.device)
        with P.wire.group(self._signature(P, f"payload of {nbytes} bytes")):
            P.communicator.broadcast(payload, self._root)
        return payload

    def _movement(self, P: Partition, nbytes: int) -> Movement:
        """The broadcast of so many bytes from the root to all others."""
        found = self._movements.get((P, nbytes))
        if found is not None:
            return found
        P_root = P.create_partition_inclusive([self._root])
        P_others = P.create_partition_inclusive([r for r in range(P.size) if r != self._root])
        P_all = P.create_partition_inclusive(range(P.size))
        plan = plan_between(
            P_root, P_others, P_all, Pairing((1,), P_others.shape), lambda _: (nbytes,),
            (self._name, nbytes),
        )  # fmt: skip
        if len(self._movements) >= _REMEMBERED:
            self._movements.clear()
        made = bind(plan, P_all, self._name, torch.uint8, (0,), torch.uint8)
        self._movements[P, nbytes] = made
        return made

    def _signature(self, P: Partition, what: str) -> Signature:
        label = f"{self._name}: {what}"
        return Signature(label, blake2b(label.encode() + P.digest, digest_size=16).digest())

    @contextmanager
    def _failing_together(self, P: Partition) -> Generator[None, None, None]:
        """What ends the host's wire ends the partition's own, where they are two."""
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


def message_bytes(nbytes: int) -> int:
    """The size of the message that carries ``nbytes`` bytes of payload, at most 1/8 more."""
    octave = 1 << max(0, nbytes.bit_length() - 1)
    step = max(ALIGNMENT_BYTES, octave // _SIZES_PER_OCTAVE)
    return -(-nbytes // step) * step
