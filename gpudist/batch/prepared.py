"""What the root can do before it sends: flatten a batch, and pack it where there is time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gpudist.batch.flattener import Flattener
from gpudist.batch.header import PACKET_BYTES
from gpudist.batch.payload import copy_into, message_bytes, pack
from gpudist.batch.places import Places
from gpudist.batch.schema import Schema


@dataclass(frozen=True)
class Prepared:
    """A batch ready to be sent.

    Attributes:
        schema, values: its structure, and what of it changes at every step.
        parts: its leaves.
        tensors: those of the leaves that autograd does not move.
        places: where they are to lie in the payload.
        is_on_host: they are in host memory.
        payload: the memory they are packed in, if they are already.
        packed: the same as tensors in it.
    """

    schema: Schema
    values: bytes
    parts: list[Any]
    tensors: list[torch.Tensor]
    places: Places
    is_on_host: bool
    payload: torch.Tensor | None = None
    packed: list[torch.Tensor] = field(default_factory=list)

    @property
    def payload_bytes(self) -> int:
        return self.places.nbytes


def prepare(
    batch: Any,
    device: torch.device,
    flattener: Flattener | None = None,
    ahead: bool = True,
    packs: bool = True,
) -> Prepared:
    """Flatten ``batch``, and pack it if it is on the CPU. Communicates nothing.

    Args:
        batch: see :func:`gpudist.broadcast_batch`.
        device: where the partition's tensors live.
        flattener: of the batches before this one.
        ahead: there is time. Else what cannot go beside the header is packed after that is sent,
            while receivers read it.
        packs: the payload is sent packed; else packing only makes this rank's copy.

    Raises:
        ShapeError, TransportError: something in it cannot be sent.
    """
    schema, parts = (flattener or Flattener()).flatten(batch)
    tensors = schema.constants(parts)
    places = Places(tensors)
    is_on_host = all([x.is_cpu for x in tensors])
    payload, packed = None, []
    if is_on_host and device.type == "cuda":
        # So that the copy to the GPU need not be waited for.
        payload = torch.empty(message_bytes(places.nbytes), dtype=torch.uint8, pin_memory=True)
        packed = pack(tensors, payload)
    elif is_on_host and (ahead or (packs and places.nbytes <= PACKET_BYTES)):
        payload, packed = places.new_tensors(message_bytes(places.nbytes))
        copy_into(packed, tensors)
    values = schema.values.write(parts)
    return Prepared(schema, values, parts, tensors, places, is_on_host, payload, packed)
