"""Numbers of indices on a grid."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.geometry.cartesian import column_major_number, rank_of


def cartesian_index_c(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the number of ``index`` on a grid of ``shape`` whose last axis runs fastest."""
    return rank_of(index, shape)


def cartesian_index_f(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the number of ``index`` on a grid of ``shape`` whose first axis runs fastest."""
    return column_major_number(index, shape)
