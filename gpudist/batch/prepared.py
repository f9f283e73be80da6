"""What the root can do before it sends: flatten a batch and pack it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpudist.batch.carrier import message_bytes
from gpudist.batch.message import constants
from gpudist.batch.payload import new_payload, pack, payload_bytes, spec_of
from gpudist.batch.schema import flatten, schema_of
from gpudist.batch.values import write_values


@dataclass(frozen=True)
class Prepared:
    """A batch ready to be sent.

    Attributes:
        schema, values: its structure, and what of it changes at every step, as they are sent.
        parts: its leaves.
        payload: its tensors in one piece, if they were all on the CPU.
    """

    schema: bytes
    values: bytes
    parts: list[Any]
    payload: torch.Tensor | None


def prepare(batch: Any, device: torch.device, differentiable: bool = False) -> Prepared:
    """Flatten ``batch``, and pack it if it is on the CPU. Communicates nothing.

    Args:
        batch: see :func:`gpudist.broadcast_batch`.
        device: where the partition's tensors live.
        differentiable: tensors that require grad are left for autograd to move.

    Raises:
        ShapeError, TransportError: something in it cannot be sent.
    """
    schema, parts = flatten(batch, differentiable)
    leaves = schema_of(schema).leaves
    tensors = constants(leaves, parts)
    payload = None
    if all([x.device.type == "cpu" for x in tensors]):
        nbytes = message_bytes(payload_bytes([spec_of(x) for x in tensors]))
        if device.type == "cuda":
            # So that the copy to the GPU need not be waited for.
            payload = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            payload = new_payload(nbytes, device)
        pack(tensors, payload)
    return Prepared(schema, write_values(leaves, parts), parts, payload)
