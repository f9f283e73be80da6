"""Send a batch between processes of one node, reading tensors in place."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from gpudist.batch.batch_message import BatchMessage
from gpudist.batch.carrier import Carrier, packet_of
from gpudist.batch.header import PACKET_BYTES
from gpudist.batch.prepared import PreparedBatch
from gpudist.world.partition import Partition


class PieceCarrier(Carrier):
    """Carrier that reads the root's tensors where they lie.

    Args:
        P: partition over a transport that ``carries_pieces``; includes this worker.
        root: position of the root in ``P``.
        name: name of the operation, on which ranks must agree.
    """

    sends_packed = False

    def __init__(self, P: Partition, root: int, name: str) -> None:
        super().__init__(P, root, name)
        others = [rank for position, rank in enumerate(P.ranks) if position != root]
        self._peers = others if P.rank == root else [P.ranks[root]]

    def send(self, message: BatchMessage, prepared: PreparedBatch) -> list[torch.Tensor]:
        places, copies = prepared.places, prepared.packed
        if prepared.payload is None and not all([_can_be_read(x) for x in prepared.tensors]):
            _, copies = places.copy()
        header, packet = message.header, packet_of(message)
        start = packet.data_ptr()
        payload: list[tuple[int, int]] = []
        for x, size, room in zip(
            copies or prepared.tensors, places.sizes, places.rooms, strict=True
        ):
            # The content of the gaps between tensors is arbitrary.
            payload += (x.data_ptr(), size), (start, room - size)
        whole = [(start, PACKET_BYTES)]
        if header.is_inline:
            end = header.payload_at + header.payload_bytes
            whole = [(start, header.payload_at), *payload, (start, PACKET_BYTES - end)]
        with self._start("packet", whole):
            self._send_rest(message)
            if header.is_inline or not places.nbytes:
                return copies or places.copy()[1]
            with self._start("payload", payload):
                return copies or places.copy()[1]

    def _broadcast(self, P: Partition, what: str, data: torch.Tensor) -> None:
        with self._start(what, [(data.data_ptr(), data.numel())]):
            pass

    def _start(self, what: str, pieces: list[tuple[int, int]]) -> AbstractContextManager[None]:
        P = self._P
        signature = self._signature(P, what)
        return P.wire.start_pieces(signature, P.rank == self._root, self._peers, pieces)


def _can_be_read(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.is_cpu and not x.is_neg() and not x.is_conj()
