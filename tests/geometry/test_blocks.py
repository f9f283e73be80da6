from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.errors import ShapeError
from gpudist.geometry import Blocks, Box, Decomposition, balanced_block
from tests.geometry.oracle import exactly
from tests.geometry.strategies import cuts, decompositions

any_cut = st.integers(0, 20).flatmap(lambda extent: cuts(extent, most_parts=7))


@exactly
@given(st.integers(0, 40), st.integers(1, 12))
def test_balanced_blocks_are_those_of_array_split(extent: int, parts: int):
    pieces = np.array_split(np.arange(extent), parts)
    for index, piece in enumerate(pieces):
        start, stop = balanced_block(extent, parts, index)
        assert start == index * (extent // parts) + min(index, extent % parts)
        assert list(range(start, stop)) == piece.tolist()


@exactly
@given(any_cut)
def test_blocks_follow_one_another_and_fill_the_extent(blocks: Blocks):
    cells = [cell for i in range(blocks.parts) for cell in range(*blocks.block(i))]
    assert cells == list(range(blocks.extent))
    assert [blocks.length(i) for i in range(blocks.parts)] == [
        stop - start for start, stop in map(blocks.block, range(blocks.parts))
    ]


@exactly
@given(any_cut)
def test_blocks_at_or_after_occupied_are_empty(blocks: Blocks):
    assert 0 <= blocks.occupied <= blocks.parts
    assert not any(blocks.length(i) for i in range(blocks.occupied, blocks.parts))
    if blocks.sizes is None:
        assert all(blocks.length(i) for i in range(blocks.occupied))


@exactly
@given(any_cut, st.integers(-5, 25), st.integers(-5, 25))
def test_overlapping_finds_every_owner_of_a_range(blocks: Blocks, start: int, stop: int):
    expected = []
    for index in range(blocks.parts):
        common = [cell for cell in range(*blocks.block(index)) if start <= cell < stop]
        if common:
            expected.append((index, common[0], common[-1] + 1))
    assert list(blocks.overlapping(start, stop)) == expected


@exactly
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_blocks_of_sizes_have_these_sizes(sizes: list[int]):
    blocks = Blocks.of_sizes(sizes)
    assert [blocks.length(i) for i in range(blocks.parts)] == sizes


def test_lengths():
    assert Blocks(7, 3).lengths == (3, 2, 2)
    assert Blocks(7, 3, (0, 6, 1)).lengths == (0, 6, 1)


def test_balanced_sizes_are_the_balanced_cut():
    assert Blocks.of_sizes([4, 4, 3]) == Blocks(11, 3)
    assert Blocks.of_sizes([4, 3, 4]).sizes == (4, 3, 4)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 4, 4), (6, -1, 6)])
def test_sizes_that_do_not_cut_the_extent_are_refused(sizes: tuple[int, ...]):
    with pytest.raises(ShapeError, match="do not cut 11 cells into 3 blocks"):
        Blocks(11, 3, sizes)


def test_negative_extents_and_absent_blocks_are_refused():
    with pytest.raises(ShapeError):
        Blocks(-1, 2)
    with pytest.raises(ShapeError):
        Blocks(4, 0)
    with pytest.raises(ShapeError):
        Blocks.of_sizes([-1])
    with pytest.raises(ShapeError):
        Blocks.of_sizes([])


@exactly
@given(decompositions())
def test_every_cell_of_a_decomposition_has_one_owner(cut: Decomposition):
    owners = np.zeros(cut.shape, dtype=int)
    for index in product(*map(range, cut.grid)):
        box = cut.block(index)
        assert box.shape == tuple(b.length(i) for b, i in zip(cut.dims, index, strict=True))
        owners[box.slices] += 1
    assert (owners == 1).all()


def test_a_balanced_decomposition_cuts_axis_by_dim():
    cut = Decomposition.balanced((2, 11), (1, 3))
    assert (cut.shape, cut.grid) == ((2, 11), (1, 3))
    assert cut.block((0, 2)) == Box((0, 8), (2, 11))


def test_a_partition_of_another_dim_is_refused():
    with pytest.raises(ShapeError, match="3 dims does not fit a partition with 2 axes"):
        Decomposition.balanced((2, 11, 4), (1, 3))


def test_extents_change_only_where_nothing_is_partitioned():
    cut = Decomposition((Blocks(2, 1), Blocks.of_sizes([1, 4])))
    assert cut.with_extents({}) is cut
    assert cut.with_extents({0: 7}) == Decomposition((Blocks(7, 1), Blocks.of_sizes([1, 4])))
    with pytest.raises(ShapeError, match=r"dims \[1\]"):
        cut.with_extents({0: 7, 1: 6})
