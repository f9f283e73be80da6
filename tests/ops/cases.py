"""Pairs of partitions of four workers: every mix of those in P_x, in P_y, in both, in neither."""

from __future__ import annotations

from typing import NamedTuple

import pytest


class Pair(NamedTuple):
    """World ranks and shape of two partitions; the second is the finer one."""

    coarse: tuple[int, ...]
    coarse_shape: tuple[int, ...]
    fine: tuple[int, ...]
    fine_shape: tuple[int, ...]


PAIRS = {
    "root inside": Pair((0,), (1,), (0, 1, 2, 3), (4,)),
    "root outside": Pair((0,), (1,), (1, 2, 3), (3,)),
    "one to one": Pair((2,), (1,), (0,), (1,)),
    "same worker": Pair((2,), (1, 1), (2,), (1, 1)),
    "two inactive": Pair((3,), (1, 1), (1, 3), (2, 1)),
    "along the last axis": Pair((0, 1), (2, 1), (0, 1, 2, 3), (2, 2)),
    "along the first axis": Pair((3, 1), (1, 2), (0, 1, 2, 3), (2, 2)),
    "padded with ones": Pair((1, 2), (2,), (3, 2, 1, 0), (2, 2)),
    "each other's root": Pair((0, 1), (2,), (1, 0), (2,)),
    "crossing groups": Pair((2, 0), (2, 1), (0, 1, 2, 3), (2, 2)),
    "disjoint": Pair((0, 3), (2, 1), (2, 1), (2, 1)),
    "three, root elsewhere": Pair((3,), (1,), (2, 0, 1), (3, 1)),
    "equal": Pair((0, 1, 2, 3), (2, 2), (0, 1, 2, 3), (2, 2)),
}

every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
