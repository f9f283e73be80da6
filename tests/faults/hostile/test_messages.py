"""Any bytes on the wire or in the store give what was sent, or an error of gpudist."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from gpudist.errors import GpudistError, PlanMismatch, TransportError
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.store import _lines_of
from gpudist.transport.host.meeting import _address
from gpudist.transport.message_header import HEADER_BYTES, MessageHeader
from tests.faults.hostile.anything import EXAMPLES

SENT = MessageHeader(3, 4096, b"0123456789abcdef", "halo exchange of ä")
anything = st.binary(max_size=80) | st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "rank", "message", ""]), inner, max_size=3)
    ),
).map(lambda value: json.dumps(value).encode())


@settings(max_examples=5 * EXAMPLES, deadline=None)
@given(
    changes=st.dictionaries(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255), max_size=4),
    length=st.just(HEADER_BYTES) | st.integers(0, HEADER_BYTES),
)
def test_headers(changes: dict[int, int], length: int) -> None:
    data = bytearray(SENT.pack())
    for place, value in changes.items():
        data[place] = value
    try:
        received = MessageHeader.unpack(bytes(data[:length]))
    except TransportError:
        return
    assert len(received.digest) == 16 and 0 <= received.nbytes < 2**64
    facts = received.digest, received.sequence, received.nbytes, received.given
    if facts == (SENT.digest, 3, 4096, SENT.given):
        SENT.verify(received, 0, 1)
    else:
        with pytest.raises(PlanMismatch, match="ranks disagree about"):
            SENT.verify(received, 0, 1)


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=anything)
def test_failures_in_the_store(text: bytes) -> None:
    failure = Failure.from_json(text.decode(errors="replace"))
    assert isinstance(failure.to_exception(), GpudistError)
    assert failure.rank is None or type(failure.rank) is int
    assert Failure.from_json(failure.to_json()) == failure


def test_a_failure_names_no_class_but_an_error() -> None:
    for kind in ("annotations", "__doc__", "RuntimeError", "GpudistError.__init__"):
        text = json.dumps({"kind": kind, "rank": 1, "message": "text"})
        assert type(Failure.from_json(text).to_exception()) is TransportError


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=anything)
def test_lines_in_the_store(text: bytes) -> None:
    assert all(isinstance(line, str) for line in _lines_of(text))


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=anything)
def test_addresses_in_the_store(text: bytes) -> None:
    try:
        address = _address(text, 2)
    except TransportError as error:
        assert "address of rank 2" in str(error)
        return
    assert json.loads(text) == list(address)


def test_what_nests_deeply_is_no_failure_and_no_address() -> None:
    deep = "[" * 100_000
    assert "cannot be read" in Failure.from_json(deep).message
    assert len(_lines_of(deep.encode())) == 1
    with pytest.raises(TransportError):
        _address(deep.encode(), 0)
