"""Prepare a batch before sending: flatten it, and pack it if there is time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gpudist.batch.flattener import flatten
from gpudist.batch.header import PACKET_BYTES
from gpudist.batch.places import Places, copy_into, tensors_in
from gpudist.batch.schema import Schema


@dataclass(frozen=True)
class PreparedBatch:
    """Batch that is ready to be sent.

    Attributes:
        schema, values: structure of the batch, and encoded values that change at every step.
        parts: leaves of the batch.
        tensors: tensors among the leaves that autograd does not move.
        places: places of the tensors in the payload.
        is_on_host: whether all tensors are in host memory.
        payload: memory with the packed tensors, ``None`` if they are not packed yet.
        packed: tensors in the payload.
    """

    schema: Schema
    values: bytes
    parts: list[Any]
    tensors: list[torch.Tensor]
    places: Places
    is_on_host: bool
    payload: torch.Tensor | None = None
    packed: list[torch.Tensor] = field(default_factory=list)


def prepare(
    batch: Any,
    device: torch.device,
    differentiable: bool = False,
    ahead: bool = True,
    packs: bool = True,
) -> PreparedBatch:
    """Flatten ``batch``, and pack it if it is on the CPU. Does not communicate.

    Args:
        batch: see :func:`gpudist.broadcast_batch`.
        device: device of the partition's tensors.
        differentiable: whether autograd moves tensors that require grad.
        ahead: whether there is time to pack now. Otherwise, a payload that does not fit into the
            packet is packed after the header has been sent, while receivers read it.
        packs: whether the payload is sent packed; otherwise packing only makes this rank's copy.

    Raises:
        ShapeError, TransportError: if something in the batch cannot be sent.
    """
    schema, parts = flatten(batch, differentiable)
    tensors = schema.constants(parts)
    places = Places(tensors)
    is_on_host = all([x.is_cpu for x in tensors])
    payload, packed = None, []
    if is_on_host and device.type == "cuda":
        # Pin the memory, so that the copy to the GPU is asynchronous.
        payload = torch.empty(places.nbytes, dtype=torch.uint8, pin_memory=True)
        packed = tensors_in(tensors, payload)
        copy_into(packed, tensors)
    elif is_on_host and (ahead or (packs and places.nbytes <= PACKET_BYTES)):
        payload, packed = places.copy()
    values = schema.values.write(parts)
    return PreparedBatch(schema, values, parts, tensors, places, is_on_host, payload, packed)
