"""Randomly damaged messages, and the two reactions allowed to a receiver: refuse, or take values.

``python -m tests.batch.mutation --count 100000 --seed 1``
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from typing import Any

import torch

from gpudist.batch.batch_message import (
    BatchMessage,
    KnownSchemas,
    batch_message,
    end_message,
    error_message,
    understand,
    values_of,
)
from gpudist.batch.header import BATCH, ERROR, HEADER_BYTES, BatchHeader, unpack_error
from gpudist.batch.leaves import PLAIN, TensorSpec
from gpudist.batch.payload import payload_bytes
from gpudist.batch.prepared import prepare
from gpudist.batch.schema import schema_of
from gpudist.checks.digest import digest_of
from gpudist.errors import TransportError
from tests.batch.nests import nest

# Damage that leaves checksums wrong never reaches the parsers behind them.
RESEALED_SHARE = 0.8


def message_of(draw: random.Random) -> BatchMessage:
    kind = draw.randrange(20)
    if kind == 0:
        return end_message(0)
    if kind == 1:
        return error_message(ValueError("text" * draw.randrange(5)), 0)
    return batch_message(prepare(nest(draw), torch.device("cpu")), KnownSchemas(), 0)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """``data`` with bytes changed, cut out, put in, or moved; now and then as it was."""
    changed = bytearray(data)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3, 8])):
        at = draw.randrange(len(changed)) if changed else 0
        how = draw.randrange(6)
        if how == 0 and changed:
            changed[at] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        elif how == 1 and changed:
            changed[at] ^= 1 << draw.randrange(8)
        elif how == 2:
            del changed[at : at + draw.randint(1, 4)]
        elif how == 3:
            changed[at:at] = draw.choice([b"\xff" * 9 + b"\x7f", draw.randbytes(3), b"\0" * 20])
        elif how == 4:
            changed[at:at] = changed[: draw.randint(1, 30)]
        elif how == 5:
            del changed[at:]
    return bytes(changed)


def damaged_message(draw: random.Random) -> tuple[bytes, bytes]:
    """Return the bytes of a header, and those of schema and values after it."""
    message = message_of(draw)
    if draw.random() > RESEALED_SHARE:
        data = damaged(draw, message.header.pack() + message.facts)
        return data[:HEADER_BYTES], data[HEADER_BYTES:]
    cut = message.header.schema_bytes
    schema, values = damaged(draw, message.facts[:cut]), damaged(draw, message.facts[cut:])
    digest = digest_of(schema)
    header = BatchHeader.of(message.header.kind, 0, values, digest, schema)
    if draw.random() < 0.1:
        field = draw.choice(["payload_bytes", "schema_bytes", "values_bytes", "step", "kind"])
        most = {"payload_bytes": 2**64, "step": 2**64, "kind": 256}.get(field, 2**32)
        value = draw.choice([0, 1, 2, most - 1, draw.randrange(most)])
        header = header._replace(**{field: value})
    else:
        try:  # the size that fits, to get past its check
            read = schema_of(schema)
            constants = read.constants(read.values.read(values))
            header = header._replace(payload_bytes=payload_bytes(constants))
        except TransportError:
            pass
    return header.pack(), schema + values


def receive(header_bytes: bytes, facts: bytes) -> str:
    """Receive a message and name the reaction; raise anything that a receiver must not raise."""
    try:
        header = BatchHeader.unpack(header_bytes)
        message = BatchMessage(header, facts[: header.facts_bytes])
        if header.kind == ERROR:
            unpack_error(values_of(message))
            return "error"
        if header.kind != BATCH:
            values_of(message)
            return "end"
        schema, parts = understand(message, KnownSchemas())
    except TransportError:
        return "refused"
    assert_harmless(schema.build(parts, schema.constants(parts)), header.payload_bytes)
    return "taken"


def assert_harmless(batch: Any, nbytes: int) -> None:
    """Assert that a batch has plain values, and tensors of the size that the header declares."""
    specs: list[TensorSpec] = []
    pending = [batch]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorSpec):
            specs.append(value)
            torch.empty(value.shape, dtype=value.dtype, device="meta")
        elif type(value) is dict:
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif type(value) not in PLAIN:
            assert type(value).__name__ in ("Sample", "Frozen"), value
            pending += vars(value).values()
    assert payload_bytes(specs) == nbytes


def run(count: int, seed: int) -> Counter[str]:
    """Count the damaged messages that were refused, taken, ...; fail if one crashes."""
    outcomes: Counter[str] = Counter()
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        header, facts = damaged_message(draw)
        modules = len(sys.modules)
        try:
            outcomes[receive(header, facts)] += 1
        except Exception as error:
            raise AssertionError(
                f"message {number} of seed {seed}: {header.hex()} {facts.hex()}"
            ) from error
        assert len(sys.modules) == modules, f"message {number} of seed {seed} imported a module"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.batch.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    outcomes = run(options.count, options.seed)
    print(f"{options.count} damaged messages, none harmful:", dict(outcomes))


if __name__ == "__main__":
    main()
