"""Wire format: messages round-trip, a structure is sent once, and damage is refused."""

from __future__ import annotations

import random
import struct
import sys
import types
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from msgpack import ExtType, Timestamp

from gpudist import broadcast_batch
from gpudist.batch.batch_message import BatchMessage, KnownSchemas, batch_message, understand
from gpudist.batch.header import ALIGNMENT_BYTES, HEADER_BYTES, PACKET_BYTES, BatchHeader
from gpudist.batch.named_classes import class_of, name_of
from gpudist.batch.packing import encode_values
from gpudist.batch.places import Places, tensors_in
from gpudist.batch.prepared import prepare
from gpudist.batch.schema import TENSOR, VALUE, Schema
from gpudist.errors import TransportError
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.batch import mutation, nests
from tests.batch.nests import Sample, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
CPU = torch.device("cpu")
LIST, DICT, SIZE, JAGGED, ARRAY = 2, 4, 5, 6, 7


def message_of(batch: Any, known: KnownSchemas) -> BatchMessage:
    return batch_message(prepare(batch, CPU), known, 0)


def test_structure_goes_once_whatever_the_lengths() -> None:
    root, receiver = KnownSchemas(), KnownSchemas()
    for step in range(4):
        batch = {"x": torch.ones(step, 100 - step), "n": 10**step, "text": "a" * step}
        message = message_of(batch, root)
        assert (message.header.schema_bytes > 0) == (step == 0)
        schema, parts = understand(message, receiver)
        assert_same(schema.build(parts, [batch["x"].clone()]), batch)
        assert schema.constants(parts)[0].shape == batch["x"].shape
    assert message_of({"x": torch.ones(3), "n": 1, "text": ""}, root).header.schema_bytes > 0
    assert message_of({"x": torch.ones(1, 1).int(), "n": 1, "text": ""}, root).header.schema_bytes


def many_structures(P_world: Partition) -> None:
    draw = random.Random(0)
    for _ in range(900):
        batch = {f"key {draw.randrange(400)}": torch.ones(2)}
        got = broadcast_batch(batch if P_world.rank == 0 else None, P_world)
        assert_same(got, batch)


def test_more_structures_than_are_remembered() -> None:
    run_distributed(many_structures, 2)


def test_payload_is_in_the_packet_exactly_while_it_fits() -> None:
    known = KnownSchemas()
    message_of(torch.ones(1), known)
    sizes = range(800, 1000)
    inline = [message_of(torch.ones(n), known).header.is_inline for n in sizes]
    limit = inline.index(False)
    assert all(inline[:limit]) and not any(inline[limit:])
    # Header and values take two places of a tensor.
    assert 4 * sizes[limit - 1] == PACKET_BYTES - 2 * ALIGNMENT_BYTES


def test_tensors_are_aligned() -> None:
    draw = random.Random(3)
    tensors = [nests.tensor(draw) for _ in range(50)]
    payload, _ = Places(tensors).copy()
    for x, y in zip(tensors, tensors_in(tensors, payload), strict=True):
        assert_same(y, x)
        assert y.numel() == 0 or y.data_ptr() % ALIGNMENT_BYTES == 0
        assert y._base is None


def example() -> BatchMessage:
    batch = {"x": torch.ones(3, 5), "n": [-7, 2.5, "text", b"bytes", None], "s": Sample(1, 2)}
    return message_of(batch, KnownSchemas())


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    message = example()
    data = message.header.pack() + message.facts
    assert mutation.receive(data[:HEADER_BYTES], data[HEADER_BYTES:]) == "taken"
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        header, facts = bytes(changed[:HEADER_BYTES]), bytes(changed[HEADER_BYTES:])
        assert mutation.receive(header, facts) == "refused"
    for count in range(len(data)):
        header, facts = data[: min(count, HEADER_BYTES)], data[HEADER_BYTES:count]
        assert mutation.receive(header, facts) == "refused"


def test_payload_without_room_in_the_packet_is_refused() -> None:
    header = message_of(torch.ones(800), KnownSchemas()).header
    assert header.is_inline and BatchHeader.unpack(header.pack()) == header
    larger = header._replace(payload_bytes=PACKET_BYTES)
    with pytest.raises(TransportError, match=f"{PACKET_BYTES} bytes of payload do not fit"):
        BatchHeader.unpack(larger.pack())


def test_structure_that_is_too_deep_is_refused() -> None:
    """The bytes of lists of one item, the innermost of which holds ``None``."""

    def lists(count: int) -> bytes:
        node: Any = VALUE
        for _ in range(count):
            node = (LIST, (), (), node)
        return encode_values(node)

    limit = 64
    assert len(Schema(lists(limit)).leaves) == 1
    for count in (limit + 1, 400):
        with pytest.raises(TransportError, match=f"it is more than {limit} containers deep"):
            Schema(lists(count))
    with pytest.raises(TransportError, match="not a valid batch: StackError"):
        Schema(bytes((0x94, LIST, 0x90, 0x90)) * 100_000 + b"\0")


@pytest.mark.parametrize(
    "node",
    [
        (), (99,), "text", {}, (TENSOR, 0, 1), (TENSOR, 99, 1, False), (99, (), ()),
        (TENSOR, 0, -1, False), (TENSOR, 0, 65, False), (TENSOR, 5, 1, True), (0, (), ()),
        (DICT,), (DICT, (), ("a", "b"), VALUE), (DICT, (), ("a", "a"), 0, 0),
        (DICT, (), ({},), 0), (DICT, (), (Timestamp(0),), 0), (name_of(Sample), (1, 2), (), 0, 0),
        ("builtins:tuple", (), ()), ("builtins:object", (), ()), ("shelve:Shelf", (), ()),
        ExtType(7, b""), ExtType(2, b"short"),
    ],
)  # fmt: skip
def test_what_is_no_structure_is_refused(node: Any) -> None:
    with pytest.raises(TransportError):
        Schema(encode_values(node))


@pytest.mark.parametrize("plain", [None, (), (1, 2), ((),), ({},), (Timestamp(0),), "text"])
def test_what_are_no_values_is_refused(plain: Any) -> None:
    schema = Schema(encode_values((LIST, (), (), (TENSOR, 5, 2, False), VALUE)))
    assert schema.values.read(encode_values(((1, 2), (-7,))))[1] == -7
    for extents in (None, (), (1,), (1, 2, 3), (1, -2), (1, 2.0), (True, 2), (1 << 40, 1 << 40)):
        with pytest.raises(TransportError):
            schema.values.read(encode_values((extents, (-7,))))
    for data in (b"", encode_values((1, 2)), encode_values(((1, 2), plain))):
        with pytest.raises(TransportError):
            schema.values.read(data)


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        *[
            (JAGGED, (torch.ones(4, 2), struct.pack("<3q", *ends), dim))
            for *ends, dim in (
                (0, 2, 5, 1), (0, 3, 2, 1), (-1, 3, 4, 1), (0, 2, 4, 0), (0, 2, 4, 3),
            )
        ],
        (JAGGED, (torch.ones(4, 2), bytes(15), 1)), (JAGGED, (torch.ones(4, 2), bytes(8), 1)),
        (JAGGED, (torch.ones(4, 2), "text", None)), (JAGGED, (torch.ones(4, 2),)),
        (ARRAY, (torch.ones(2).bfloat16(),)), (ARRAY, (1,)), (SIZE, ("text",)),
        (name_of(nests.Split), ("MISSING",)), (name_of(nests.Split), ()),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(reference: Any, parts: tuple[Any, ...]) -> None:
    leaves = [(TENSOR, 5, 1, False) if isinstance(x, torch.Tensor) else VALUE for x in parts]
    schema = Schema(encode_values((reference, (), (), *leaves)))
    tensors = [x for x in parts if isinstance(x, torch.Tensor)]
    with pytest.raises(TransportError):
        schema.build(parts, tensors)


def test_attributes_run_no_code_of_their_class() -> None:
    node = (name_of(nests.Named), ("name", "__class__", "__dict__"), ("a",), 0, 0, 0, 0)
    built = Schema(encode_values(node)).build([1, 2, 3, 4], [])
    assert type(built) is nests.Named and dict(built) == {"a": 4}


@pytest.mark.filterwarnings("ignore")
def test_damaged_messages() -> None:
    outcomes = mutation.run(3000, seed=2)
    # The test would prove nothing if no mutation passed the checksums.
    assert outcomes["refused"] > 1000 and outcomes["taken"] > 100


class SlottedMapping(dict[str, int]):
    __slots__ = ("more",)


class ClosedMapping(UserDict[str, int]):
    def __del__(self) -> None:
        raise AssertionError("no code of a class runs")


def test_classes_are_refused() -> None:
    here, outer = __name__, name_of(nests.Outer)
    for name, *fields in [
        (name_of(Sample), "x"), (name_of(Sample), "y", "x"), (outer,), (f"{outer}.missing.more",),
        (f"{here}:missing",), (f"{here}:SlottedMapping",), (f"{here}:ClosedMapping",),
        (name_of(Mapping),), ("antigravity:geohash",), ("os:system",), ("types:MappingProxyType",),
        ("builtins:tuple",), ("builtins:type",), ("",), (":",),
    ]:  # fmt: skip
        with pytest.raises(TransportError, match="the batch has a"):
            Schema(encode_values((name, fields, (), *[VALUE] * len(fields))))
    assert "antigravity" not in sys.modules


def test_a_module_is_not_asked_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy")
    vars(lazy)["__getattr__"] = lambda name: pytest.fail(f"asked for {name}")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(TransportError, match="finds no dataclass"):
        class_of("lazy:Model")
