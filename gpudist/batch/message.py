"""What the root says in the bytes before the payload, and how receivers understand it.

Nothing here communicates: bytes in, values out, and ``TransportError`` for whatever is no message.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpudist.batch.header import BATCH, END, ERROR, Header, pack_error
from gpudist.batch.payload import payload_bytes
from gpudist.batch.prepared import Prepared
from gpudist.batch.reading import malformed
from gpudist.batch.schema import Schema, schema_of

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

    def add(self, schema: Schema) -> None:
        if len(self._schemas) >= _REMEMBERED:
            self._schemas.clear()
        self._schemas[schema.digest] = schema


class Message(NamedTuple):
    """A header, and the bytes of schema and values that belong to it."""

    header: Header
    facts: bytes


def batch_message(prepared: Prepared, known: KnownSchemas, step: int) -> Message:
    """The message of a batch; its schema is in it if the receivers lack it."""
    schema = prepared.schema
    data = b""
    if schema.digest not in known:
        known.add(schema)
        data = schema.data
    header = Header.of(
        BATCH, step, prepared.values, schema.digest, data, prepared.payload_bytes,
        prepared.is_on_host,
    )  # fmt: skip
    return Message(header, data + prepared.values)


def end_message(step: int) -> Message:
    """There are no more batches."""
    return Message(Header.of(END, step, b""), b"")


def error_message(error: BaseException, step: int) -> Message:
    """The root raised this in place of a batch."""
    values = pack_error(error)
    return Message(Header.of(ERROR, step, values), values)


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
        schema = schema_of(facts[: header.schema_bytes])
        if schema.digest != header.digest:
            raise malformed("the digest of its schema is wrong")
        known.add(schema)
    schema = known[header.digest]
    if schema.has_gradients and not differentiable:
        raise malformed("a tensor requires grad, where none was to")
    parts = schema.values.read(values)
    expected = payload_bytes(schema.constants(parts))
    if expected != header.payload_bytes:
        raise malformed(f"its tensors have {expected} bytes, not {header.payload_bytes}")
    return schema, parts


def values_of(message: Message) -> bytes:
    """The values, as they were sent.

    Raises:
        TransportError: they are not.
    """
    values = message.facts[message.header.schema_bytes :]
    message.header.check_values(values)
    return values
