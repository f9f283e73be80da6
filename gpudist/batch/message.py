"""What the root says in the bytes before the payload, and how receivers understand it.

Nothing here communicates: bytes in, values out, and ``TransportError`` for whatever is no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpudist.batch.header import BATCH, END, ERROR, Header, pack_error
from gpudist.batch.payload import payload_bytes, spec_of
from gpudist.batch.reading import malformed
from gpudist.batch.schema import Schema, digest_of, schema_of
from gpudist.batch.values import TENSOR, Leaf, read_values

_REMEMBERED = 256


class KnownSchemas:
    """The schemas that the root has sent.

    Root and receivers add them in the same order and forget them together, so they never differ.
    """

    def __init__(self) -> None:
        self._schemas: dict[bytes, Schema] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._schemas

    def __getitem__(self, digest: bytes) -> Schema:
        found = self._schemas.get(digest)
        if found is None:
            raise malformed("its schema has not come before")
        return found

    def add(self, digest: bytes, schema: Schema) -> None:
        if len(self._schemas) >= _REMEMBERED:
            self._schemas.clear()
        self._schemas[digest] = schema


@dataclass(frozen=True)
class Message:
    """A header, and the bytes of schema and values that belong to it."""

    header: Header
    facts: bytes

    def at_step(self, step: int) -> Message:
        return replace(self, header=replace(self.header, step=step))


def batch_message(
    schema: bytes, values: bytes, parts: Sequence[Any], known: KnownSchemas, on_host: bool
) -> Message:
    """The message of a batch with these leaves; its schema is in it if the receivers lack it.

    ``on_host``: the payload is in memory that can go beside the header.
    """
    digest = digest_of(schema)
    leaves = schema_of(schema).leaves
    specs = [spec_of(x) for x in constants(leaves, parts)]
    is_new = digest not in known
    if is_new:
        known.add(digest, schema_of(schema))
    header = Header(
        BATCH, 0, digest, len(schema) if is_new else 0, payload_bytes=payload_bytes(specs)
    ).sealed(values)
    if on_host and header.payload_fits:
        header = replace(header, is_inline=True)
    return Message(header, schema + values if is_new else values)


def end_message() -> Message:
    """There are no more batches."""
    return Message(Header(END, 0).sealed(b""), b"")


def error_message(error: BaseException) -> Message:
    """The root raised this in place of a batch."""
    values = pack_error(error)
    return Message(Header(ERROR, 0).sealed(values), values)


def understand(
    message: Message, known: KnownSchemas, differentiable: bool = False
) -> tuple[Schema, list[Any]]:
    """The schema and the leaves of a batch, with a ``TensorSpec`` in place of each tensor.

    ``differentiable``: tensors may require grad.

    Raises:
        TransportError: these bytes are no message of a batch, or it names a class that this process
            does not have.
    """
    header, facts = message.header, message.facts
    values = values_of(message)
    if header.schema_bytes:
        schema = facts[: header.schema_bytes]
        if digest_of(schema) != header.digest:
            raise malformed("the digest of its schema is wrong")
        known.add(header.digest, schema_of(schema))
    found = known[header.digest]
    if not differentiable and any([leaf.requires_grad for leaf in found.leaves]):
        raise malformed("a tensor requires grad, where none was to")
    leaves = read_values(found.leaves, values)
    expected = payload_bytes(constants(found.leaves, leaves))
    if expected != header.payload_bytes:
        raise malformed(f"its tensors have {expected} bytes, not {header.payload_bytes}")
    return found, leaves


def values_of(message: Message) -> bytes:
    """The values, as they were sent.

    Raises:
        TransportError: they are not.
    """
    values = message.facts[message.header.schema_bytes :]
    message.header.check_values(values)
    return values


def constants(leaves: Sequence[Leaf], parts: Sequence[Any]) -> list[Any]:
    """Those of ``parts`` that are tensors without gradient: they make up the payload."""
    return [
        part
        for leaf, part in zip(leaves, parts, strict=True)
        if leaf.kind == TENSOR and not leaf.requires_grad
    ]


def filled(
    leaves: Sequence[Leaf],
    parts: Sequence[Any],
    moved: Sequence[torch.Tensor],
    differentiable: Sequence[torch.Tensor],
) -> list[Any]:
    """``parts`` with the tensors that have come in the places of tensors."""
    plain, recorded = iter(moved), iter(differentiable)
    return [
        part if leaf.kind != TENSOR else next(recorded if leaf.requires_grad else plain)
        for leaf, part in zip(leaves, parts, strict=True)
    ]
