"""Texts of all ranks arrive whole, whatever their lengths, in as few messages as they need."""

from __future__ import annotations

import pytest

from gpudist.world.partition import Partition
from gpudist.world.texts import gather_texts, gather_texts_on_first
from tests.pool import distributed

CASES = {
    "of one length": [b"abc", b"\0\xff\n", b"def"],
    "of several": [b"", b"a" * 9, "\u20ac".encode()],
    "long": [b"a" * 100_000, b"", b"b"],
    "empty": [b"", b"", b""],
}


@pytest.mark.parametrize("case", CASES)
@distributed(ranks=[1, 3])
def test_texts(P_world: Partition, case: str) -> None:
    assert P_world.rank is not None
    texts = CASES[case][: P_world.size]
    assert gather_texts(P_world, texts[P_world.rank]) == texts
    assert gather_texts_on_first(P_world, texts[P_world.rank]) == (
        texts if P_world.rank == 0 else []
    )


@distributed(ranks=3, transports=("loopback", "host"))
def test_messages(P_world: Partition) -> None:
    def calls_of(text: bytes) -> int:
        before = P_world.wire.recorder.count
        gather_texts(P_world, text)
        return P_world.wire.recorder.count - before

    assert (calls_of(b""), calls_of(b"text")) == (1, 2)
