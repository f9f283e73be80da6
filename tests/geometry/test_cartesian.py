from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.errors import PartitionError
from gpudist.geometry.cartesian import (
    column_major_index,
    column_major_number,
    index_of,
    integers,
    pad_left,
    rank_of,
    size_of,
)
from tests.geometry.oracle import exactly

grids = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize("numbers", [[1.0], ["1"], [1, None]])
def test_only_integers_are_integers(numbers: list[object]):
    assert integers(np.array([3, 4]), "ranks") == (3, 4)
    with pytest.raises(PartitionError, match="ranks must be a list of integers, not "):
        integers(numbers, "ranks")


@exactly
@given(grids)
def test_ranks_are_row_major(grid: tuple[int, ...]):
    for rank, index in enumerate(np.ndindex(grid)):
        assert rank_of(index, grid) == rank
        assert index_of(rank, grid) == index
    assert size_of(grid) == rank + 1


@exactly
@given(grids)
def test_column_major_numbers_run_fastest_along_the_first_axis(grid: tuple[int, ...]):
    for index in np.ndindex(grid):
        number = np.ravel_multi_index(index, grid, order="F")
        assert column_major_number(index, grid) == number
        assert column_major_index(int(number), grid) == index


def test_a_grid_without_axes_has_one_worker():
    assert size_of(()) == 1
    assert rank_of((), ()) == 0
    assert index_of(0, ()) == ()


def test_an_index_of_another_dim_is_refused():
    with pytest.raises(ValueError):
        rank_of((0, 1), (2,))


def test_left_padded_never_shortens():
    assert pad_left((2, 3), 4, 1) == (1, 1, 2, 3)
    assert pad_left([2, 3], 1, 1) == (2, 3)
