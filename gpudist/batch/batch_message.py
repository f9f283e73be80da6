"""Encode the header, schema and values of a batch, and decode them on the receivers.

This module does not communicate: its functions convert between bytes and values, and raise
``TransportError`` for bytes that are not a message.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from gpudist.batch.header import BatchHeader
from gpudist.batch.packing import batch_error
from gpudist.batch.places import Places
from gpudist.batch.prepared import PreparedBatch
from gpudist.batch.schema import Schema, schema_of
from gpudist.cache import Cache


class KnownSchemas(Cache[bytes, Schema]):
    """Schemas that the root has sent, by digest.

    Root and receivers add schemas in the same order, so that their sets never differ.
    """

    def __missing__(self, digest: bytes) -> Schema:
        raise batch_error("its schema has not been sent before")


class BatchMessage(NamedTuple):
    """Header, with the bytes of its schema and values."""

    header: BatchHeader
    facts: bytes


def batch_message(
    prepared: PreparedBatch, known: KnownSchemas, step: int, is_error: bool = False
) -> BatchMessage:
    """Create the message of a batch; it includes the schema if the receivers do not have it."""
    schema = prepared.schema
    data = b""
    if schema.digest not in known:
        known[schema.digest] = schema
        data = schema.data
    header = BatchHeader.of(
        step, prepared.values, schema.digest, data, prepared.places.nbytes, is_error,
        prepared.is_on_host,
    )  # fmt: skip
    return BatchMessage(header, data + prepared.values)


def understand(
    message: BatchMessage, known: KnownSchemas, differentiable: bool = False
) -> tuple[Schema, list[Any]]:
    """Decode the schema and the leaves of a batch, with a ``TensorSpec`` in place of each tensor.

    ``differentiable``: whether tensors may require grad.

    Raises:
        TransportError: if the bytes are not the message of a batch, or name a class that this
            process does not have.
    """
    header, facts = message.header, message.facts
    values = facts[header.schema_bytes :]
    if zlib.crc32(values) != header.values_checksum:
        raise batch_error("the checksum of its values is wrong")
    if header.schema_bytes:
        schema = schema_of(facts[: header.schema_bytes])
        if schema.digest != header.digest:
            raise batch_error("the digest of its schema is wrong")
        known[schema.digest] = schema
    schema = known[header.digest]
    if schema.has_gradients and not differentiable:
        raise batch_error("a tensor requires grad, but the batch is not differentiable")
    parts = schema.values.read(values)
    expected = Places(schema.constants(parts)).nbytes
    if expected != header.payload_bytes:
        raise batch_error(f"its tensors have {expected} bytes, not {header.payload_bytes}")
    return schema, parts
