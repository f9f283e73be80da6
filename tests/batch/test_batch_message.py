"""Wire format: messages round-trip, a structure is sent once, and damage is refused."""

from __future__ import annotations

import dataclasses
import random
import struct
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgpack import ExtType, Timestamp

from gpudist import broadcast_batch
from gpudist.batch.batch_message import BatchMessage, KnownSchemas, batch_message, understand
from gpudist.batch.header import ALIGNMENT_BYTES, HEADER_BYTES, PACKET_BYTES, BatchHeader
from gpudist.batch.named_classes import class_named, name_of, rebuild
from gpudist.batch.packing import encode_values
from gpudist.batch.payload import message_bytes, pack, payload_bytes
from gpudist.batch.places import tensors_in
from gpudist.batch.prepared import prepare
from gpudist.batch.schema import Kind, Schema
from gpudist.errors import TransportError
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.batch import mutation, nests
from tests.batch.nests import Sample, assert_same, nest

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
CPU = torch.device("cpu")


def message_of(batch: Any, known: KnownSchemas) -> BatchMessage:
    return batch_message(prepare(batch, CPU), known, 0)


def broadcast_twice(P_world: Partition, batch: Any) -> tuple[Any, Any]:
    mine = batch if P_world.rank == 1 else None
    first = broadcast_batch(mine, P_world, root=1)
    return first, broadcast_batch(mine, P_world, root=1)


@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_any_nest(draw: random.Random) -> None:
    batch = nest(draw)
    for first, second in run_distributed(broadcast_twice, 2, batch):
        assert_same(first, batch)
        assert_same(second, batch)


def test_structure_goes_once_whatever_the_lengths() -> None:
    root, receiver = KnownSchemas(), KnownSchemas()
    for step in range(4):
        batch = {"x": torch.ones(step, 100 - step), "n": 10**step, "text": "a" * step}
        message = message_of(batch, root)
        assert (message.header.schema_bytes > 0) == (step == 0)
        schema, parts = understand(message, receiver)
        built = schema.build(parts, schema.constants(parts))
        assert (built["x"].shape, built["n"], built["text"]) == (
            (step, 100 - step),
            10**step,
            "a" * step,
        )
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
    payload = torch.empty(payload_bytes(tensors), dtype=torch.uint8)
    pack(tensors, payload)
    for x, y in zip(tensors, tensors_in(tensors, payload), strict=True):
        assert_same(y, x)
        assert y.numel() == 0 or y.data_ptr() % ALIGNMENT_BYTES == 0
        assert y._base is None


@pytest.mark.parametrize("shape", [(3, 50, 70), (2, 3, 1, 5, 2, 7, 1, 9)])
def test_what_is_not_contiguous_is_packed(shape: tuple[int, ...]) -> None:
    for dtype in nests.DTYPES:
        if dtype in nests._BITS_ONLY and dtype.itemsize > 1:
            continue
        x = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
        turned = x.permute(*reversed(range(x.dim())))
        assert not turned.is_contiguous()
        payload = torch.empty(payload_bytes([turned]), dtype=torch.uint8)
        pack([turned], payload)
        assert_same(tensors_in([turned], payload)[0], turned)


def test_sizes_of_messages() -> None:
    assert message_bytes(0) == 0
    sizes = {message_bytes(n) for n in range(1 << 10, 1 << 14)}
    assert len(sizes) <= 4 * 8 + 1
    assert all(n <= message_bytes(n) <= n + max(64, n // 8) for n in range(1 << 14))


def test_conjugated_views_are_sent_as_they_read() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    payload = torch.empty(payload_bytes([z]), dtype=torch.uint8)
    for x in (z.conj(), z.conj().imag, torch.stack([z, z]).t().conj()):
        large = torch.empty(payload_bytes([x]), dtype=torch.uint8)
        pack([x], large)
        assert torch.equal(tensors_in([x], large)[0], x)
    assert payload.numel() == ALIGNMENT_BYTES


def example() -> BatchMessage:
    batch = {"x": torch.ones(3, 5), "n": [-7, 2.5, "text", b"bytes", None], "s": Sample(1, 2)}
    return message_of(batch, KnownSchemas())


def test_every_flipped_bit_of_a_header_is_refused() -> None:
    header = example().header.pack()
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransportError):
            BatchHeader.unpack(bytes(changed))


def test_every_flipped_bit_of_the_facts_is_refused() -> None:
    message = example()
    header = message.header.pack()
    assert mutation.receive(header, message.facts) == "taken"
    for bit in range(8 * len(message.facts)):
        changed = bytearray(message.facts)
        changed[bit // 8] ^= 1 << bit % 8
        assert mutation.receive(header, bytes(changed)) == "refused"


def test_everything_cut_short_is_refused() -> None:
    message = example()
    header = message.header.pack()
    for count in range(len(header)):
        assert mutation.receive(header[:count], message.facts) == "refused"
    for count in range(len(message.facts)):
        assert mutation.receive(header, message.facts[:count]) == "refused"


def test_payload_without_room_in_the_packet_is_refused() -> None:
    header = message_of(torch.ones(800), KnownSchemas()).header
    assert header.is_inline and BatchHeader.unpack(header.pack()) == header
    larger = header._replace(payload_bytes=PACKET_BYTES)
    with pytest.raises(TransportError, match=f"{PACKET_BYTES} bytes of payload do not fit"):
        BatchHeader.unpack(larger.pack())


def test_structure_that_is_too_deep_is_refused() -> None:
    """The bytes of lists of one item, the innermost of which holds ``None``."""

    def lists(count: int) -> bytes:
        node: Any = Kind.VALUE
        for _ in range(count):
            node = (Kind.LIST, node)
        return encode_values(node)

    limit = 64
    assert len(Schema(lists(limit)).leaves) == 1
    for count in (limit + 1, 400):
        with pytest.raises(TransportError, match=f"it is more than {limit} containers deep"):
            Schema(lists(count))
    with pytest.raises(TransportError, match="not a valid batch: StackError"):
        Schema(bytes((0x92, Kind.LIST)) * 100_000 + b"\0")


@pytest.mark.parametrize(
    "node",
    [
        (), (99,), "text", {}, (Kind.TENSOR, 0, 1), (Kind.TENSOR, 99, 1, False),
        (Kind.TENSOR, 0, -1, False), (Kind.TENSOR, 0, 65, False), (Kind.TENSOR, 5, 1, True),
        (Kind.DICT,), (Kind.DICT, ("a", "b"), Kind.VALUE), (Kind.DICT, ("a", "a"), 0, 0),
        (Kind.DICT, ({},), 0), (Kind.DICT, (Timestamp(0),), 0), (Kind.DATACLASS, 1, (), 0),
        (Kind.NAMED_TUPLE, "builtins:tuple", ()), ExtType(7, b""), ExtType(2, b"short"),
    ],
)  # fmt: skip
def test_what_is_no_structure_is_refused(node: Any) -> None:
    with pytest.raises(TransportError):
        Schema(encode_values(node))


@pytest.mark.parametrize("plain", [None, (), (1, 2), ((),), ({},), (Timestamp(0),), "text"])
def test_what_are_no_values_is_refused(plain: Any) -> None:
    schema = Schema(encode_values((Kind.LIST, (Kind.TENSOR, 5, 2, False), Kind.VALUE)))
    extents = struct.pack("<B2I", 4, 1, 2)
    assert schema.values.read(extents + encode_values((-7,)))[1] == -7
    with pytest.raises(TransportError):
        schema.values.read(extents + encode_values(plain))
    for data in (b"", extents, extents[:-1], struct.pack("<B2Q", 8, 1 << 40, 1 << 40)):
        with pytest.raises(TransportError):
            schema.values.read(data)


@pytest.mark.filterwarnings("ignore")
def test_damaged_messages() -> None:
    outcomes = mutation.run(3000, seed=2)
    # The test would prove nothing if no mutation passed the checksums.
    assert outcomes["refused"] > 1000 and outcomes["taken"] > 100


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("a", "b")
    a: int
    b: int


class Outer:
    @dataclasses.dataclass
    class Inner:
        x: int


@dataclasses.dataclass
class AlsoADict(dict):
    x: int = 0


@pytest.mark.parametrize("cls", [Slotted, Outer.Inner, Sample, nests.Frozen])
def test_classes_are_found_and_rebuilt(cls: type) -> None:
    fields = [field.name for field in dataclasses.fields(cls)]
    assert class_named(name_of(cls), fields, False) is cls
    made = rebuild(cls, fields, list(range(len(fields))))
    assert type(made) is cls
    assert [getattr(made, field) for field in fields] == list(range(len(fields)))


def test_classes_are_refused() -> None:
    here = __name__
    for name, fields, is_tuple in [
        (f"{here}:Slotted", ["a"], False),
        (f"{here}:Slotted", ["a", "b"], True),
        (f"{here}:AlsoADict", ["x"], False),
        (f"{here}:Outer", [], False),
        (f"{here}:missing", [], False),
        (f"{here}:Outer.missing.more", [], False),
        ("antigravity:geohash", [], False),
        ("os:system", [], False),
        ("builtins:tuple", [], True),
        ("", [], False),
        (":", [], False),
    ]:
        with pytest.raises(TransportError, match="the batch has a"):
            class_named(name, fields, is_tuple)
    assert "antigravity" not in sys.modules


def test_a_module_is_not_asked_to_import() -> None:
    lazy = types.ModuleType("lazy_module_of_a_test")

    def importing(name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    vars(lazy)["__getattr__"] = importing
    sys.modules[lazy.__name__] = lazy
    try:
        with pytest.raises(TransportError, match="finds no dataclass"):
            class_named("lazy_module_of_a_test:Model", [], False)
    finally:
        del sys.modules[lazy.__name__]
