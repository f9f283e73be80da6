"""Randomly damaged messages, and the two reactions allowed to a receiver: refuse, or take values.

``python -m tests.batch.mutation --count 100000 --seed 1``
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from enum import Enum
from typing import Any

import numpy as np
import torch

from gpudist.batch.batch_message import BatchMessage, KnownSchemas, batch_message, understand
from gpudist.batch.header import HEADER_BYTES, BatchHeader
from gpudist.batch.leaves import PLAIN
from gpudist.batch.places import Places, tensors_in
from gpudist.batch.prepared import prepare
from gpudist.batch.schema import schema_of
from gpudist.checks.digest import digest_of
from gpudist.errors import TransportError
from tests.batch import nests
from tests.batch.nests import Flags, Level, Split, nest

# Damage that leaves checksums wrong never reaches the parsers behind them.
RESEALED_SHARE = 0.8
MOST_BYTES = 1 << 20


def message_of(draw: random.Random) -> BatchMessage:
    prepared = prepare(nest(draw), torch.device("cpu"))
    return batch_message(prepared, KnownSchemas(), 0, is_error=draw.random() < 0.1)


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
    header = BatchHeader.of(0, values, digest, schema, is_error=message.header.is_error)
    if draw.random() < 0.1:
        field = draw.choice(["payload_bytes", "schema_bytes", "values_bytes", "step"])
        most = {"payload_bytes": 2**64, "step": 2**64}.get(field, 2**32)
        value = draw.choice([0, 1, 2, most - 1, draw.randrange(most)])
        header = header._replace(**{field: value})
    else:
        try:  # the size that fits, to get past its check
            read = schema_of(schema)
            constants = read.constants(read.values.read(values))
            header = header._replace(payload_bytes=Places(constants).nbytes)
        except TransportError:
            pass
    return header.pack(), schema + values


def receive(header_bytes: bytes, facts: bytes) -> str:
    """Receive a message and name the reaction; raise anything that a receiver must not raise."""
    try:
        header = BatchHeader.unpack(header_bytes)
        message = BatchMessage(header, facts[: header.facts_bytes])
        schema, parts = understand(message, KnownSchemas())
    except TransportError:
        return "refused"
    specs = schema.constants(parts)
    assert Places(specs).nbytes == header.payload_bytes
    for spec in specs:
        torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    if header.payload_bytes < MOST_BYTES:
        tensors = tensors_in(specs, torch.zeros(header.payload_bytes, dtype=torch.uint8))
        try:
            assert_harmless(schema.build(parts, tensors))
        except TransportError:
            return "refused"
    return "taken"


def assert_harmless(batch: Any) -> None:
    """Assert that a batch has tensors, plain values, and instances of classes of the tests."""
    pending = [batch]
    while pending:
        value = pending.pop()
        cls = type(value)
        if isinstance(value, torch.Tensor):
            # Its offsets were checked, so that it can be read.
            assert not value.is_nested or len(value.unbind()) >= 0
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, (np.ndarray, np.generic)):
            assert not value.dtype.hasobject
        elif cls.__module__ == nests.__name__ and not isinstance(value, Enum):
            pending += [getattr(value, name) for name in getattr(cls, "__slots__", ())]
            pending += getattr(value, "__dict__", {}).values()
            pending += dict.values(value) if isinstance(value, dict) else ()
            pending += tuple(value) if isinstance(value, tuple) else ()
        elif isinstance(value, dict):
            assert cls.__module__ in ("builtins", "collections"), value
            pending += value.values()
        else:
            assert cls in PLAIN or cls in (Split, Level, Flags), value


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
