"""What the root can do before it sends: flatten a batch and pack it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpudist.batch.carrier import message_bytes
from gpudist.batch.header import PACKET_BYTES
from gpudist.batch.payload import new_payload, pack, payload_bytes
from gpudist.batch.schema import Schema, flatten, schema_of
from gpudist.batch.values import write_values


@dataclass(frozen=True)
class Prepared:
    """A batch ready to be sent.

    Attributes:
        schema, values: its structure, and what of it changes at every step.
        parts: its leaves.
        payload_bytes: of the tensors that autograd does not move.
        payload: those tensors in one piece, if they are packed already.
        packed: the same as tensors in that memory.
    """

    schema: Schema
    values: bytes
    parts: list[Any]
    payload_bytes: int
    payload: torch.Tensor | None
    packed: list[torch.Tensor]


def prepare(
    batch: Any, device: torch.device, differentiable: bool = False, ahead: bool = True
) -> Prepared:
    """Flatten ``batch``, and pack it if it is on the CPU. Communicates nothing.

    Args:
        batch: see :func:`gpudist.broadcast_batch`.
        device: where the partition's tensors live.
        differentiable: tensors that require grad are left for autograd to move.
        ahead: there is time. Else what cannot go beside the header is packed after that is sent,
            while receivers read it.

    Raises:
        ShapeError, TransportError: something in it cannot be sent.
    """
    data, parts = flatten(batch, differentiable)
    schema = schema_of(data)
    tensors = schema.constants(parts)
    nbytes = payload_bytes(tensors)
    payload, packed = None, []
    is_soon_enough = ahead or device.type != "cpu" or nbytes <= PACKET_BYTES
    if is_soon_enough and all([x.is_cpu for x in tensors]):
        if device.type == "cuda":
            # So that the copy to the GPU need not be waited for.
            payload = torch.empty(message_bytes(nbytes), dtype=torch.uint8, pin_memory=True)
        else:
            payload = new_payload(message_bytes(nbytes), device)
        packed = pack(tensors, payload)
    return Prepared(schema, write_values(schema.leaves, parts), parts, nbytes, payload, packed)
