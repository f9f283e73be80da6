"""Heads in blocks: each worker holds the keys that its queries use."""

from __future__ import annotations

import pytest

from gpudist.errors import ShapeError
from gpudist.nn.tensor_parallel.head_cut import HeadCut


def test_heads_come_out_even() -> None:
    cut = HeadCut.of("L", 8, 4, 2)
    assert (cut.group, cut.queries, cut.keys) == (2, (4, 4), (2, 2))
    assert [cut.used_keys(rank) for rank in range(2)] == [(0, 2), (0, 2)]
    assert cut.key_of_queries(1) == [0, 0, 1, 1]


def test_fewer_keys_than_workers() -> None:
    cut = HeadCut.of("L", 8, 2, 4)
    assert (cut.queries, cut.keys) == ((2, 2, 2, 2), (1, 1))
    assert cut.key_of_queries(3) == [0, 0]


def test_queries_are_balanced_first() -> None:
    """Five keys on four workers would leave one with twice the queries."""
    cut = HeadCut.of("L", 20, 5, 4)
    assert (cut.queries, cut.keys) == ((5, 5, 5, 5), (5,))
    assert [cut.used_keys(rank) for rank in range(4)] == [(0, 2), (1, 3), (2, 4), (3, 5)]
    assert cut.key_of_queries(1) == [0, 0, 0, 1, 1]


def test_more_workers_than_heads() -> None:
    cut = HeadCut.of("L", 2, 1, 3)
    assert (cut.queries, cut.keys) == ((1, 1, 0), (1,))
    assert cut.used_keys(2) == (0, 0) and cut.key_of_queries(2) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("keys", range(1, 7))
@pytest.mark.parametrize("group", range(1, 5))
def test_every_query_finds_its_key(size: int, keys: int, group: int) -> None:
    cut = HeadCut.of("L", keys * group, keys, size)
    found: list[int] = []
    for rank in range(size):
        held = sum(cut.keys[: rank // (size // cut.blocks)])
        first, last = cut.used_keys(rank)
        assert 0 <= first <= last <= cut.keys[rank // (size // cut.blocks)]
        local = cut.key_of_queries(rank)
        assert set(local) == set(range(last - first))
        found += [held + first + key for key in local]
    assert found == [head // group for head in range(keys * group)]


def test_queries_that_do_not_share_evenly() -> None:
    with pytest.raises(ShapeError, match="num_heads 5 must be a multiple of num_kv_heads 2"):
        HeadCut.of("L", 5, 2, 2)
