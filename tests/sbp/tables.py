"""Families of operators, compared with their tables and, for any attributes, with torch."""

from __future__ import annotations

import math
import random as python_random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from gpudist.geometry.layout import NdSbp, Sbp
from gpudist.sbp import Placement, explain
from gpudist.world.partition import Partition
from tests.every import EVERY
from tests.sbp.compare import Function, assert_matches
from tests.sbp.parts import B, P, S

GRIDS: list[Any] = [range(8), [[0, 1, 2], [3, 4, 5]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]
Row = tuple[Sequence[Sbp], Sbp]

# Part of the drawn layouts that is tried.
DRAWS = 1.0 if EVERY else 0.125


def attributes(x: torch.Tensor, axes: int = 1) -> list[NdSbp]:
    """All that a tensor may have; of integers the tests make no terms."""
    ones = [*map(S, range(x.dim())), B]
    return list(product([*ones, P] if x.is_floating_point() else ones, repeat=axes))


def sizes_of(extent: int, parts: int, chosen: python_random.Random) -> list[int]:
    """Sizes of blocks of ``extent`` cells, some of them empty; others than the balanced ones."""
    sizes = [0] * (parts - 1) + [extent]
    for _ in range(9):
        ends = sorted(chosen.randint(0, extent) for _ in range(parts - 1))
        drawn = [b - a for a, b in zip([0, *ends], [*ends, extent], strict=True)]
        sizes = drawn if S(0, drawn) != S(0) else sizes
    return sizes


def cut_at(one: Sbp, sizes: dict[int, list[int]], shape: Sequence[int]) -> Sbp:
    """Return a split in blocks of the sizes for its number of cells; others as they are."""
    return S(one.dim, sizes[shape[one.dim]]) if one.is_split else one


def assert_table(
    P_world: Partition,
    function: Function,
    xs: Sequence[torch.Tensor],
    rows: Sequence[Row],
    cuts: bool = True,
) -> None:
    """Inputs as in a row give outputs as in the row on one axis, without boxing.

    Args:
        cuts: the same is true of blocks of explicit sizes.
    """
    placement = Placement("cpu", [0, 1, 2], P_world)
    chosen = python_random.Random(str(rows))
    sizes = {n: sizes_of(n, 3, chosen) for x in xs for n in x.shape}
    for inputs, output in rows:
        _assert_row(placement, function, xs, inputs, lambda shape, one=output: one)
        if cuts and any(one.is_split for one in inputs):
            given = [cut_at(one, sizes, x.shape) for one, x in zip(inputs, xs, strict=True)]
            _assert_row(
                placement, function, xs, given, lambda shape, one=output: cut_at(one, sizes, shape)
            )


def _assert_row(
    placement: Placement,
    function: Function,
    xs: Sequence[torch.Tensor],
    inputs: Sequence[Sbp],
    output: Callable[[Sequence[int]], Sbp],
) -> None:
    with explain() as lines:
        outputs = assert_matches(function, xs, placement, [(one,) for one in inputs])
    assert lines and all(line.endswith("; 0 bytes boxed") for line in lines), lines
    for y in outputs:
        assert y.sbp == (output(y.shape),), lines


def cut_somewhere(
    sbp: NdSbp, grid: Sequence[int], shape: Sequence[int], chosen: python_random.Random
) -> NdSbp:
    """The same with explicit sizes for some of the outer splits."""
    found: list[Sbp] = []
    for one, parts in zip(sbp, grid, strict=True):
        is_outer = one.is_split and all(other.dim != one.dim for other in found)
        if is_outer and chosen.random() < 0.5:
            one = S(one.dim, sizes_of(shape[one.dim], parts, chosen))
        found.append(one)
    return tuple(found)


def assert_everywhere(
    P_world: Partition,
    function: Function,
    xs: Sequence[torch.Tensor],
    draws: tuple[int, int, int] = (8, 5, 3),
    double: bool = True,
) -> None:
    """Drawn attributes on arrays of one, two and three axes: what does not fit is boxed.

    Some splits are of explicit sizes.
    """
    chosen = python_random.Random(str([x.shape for x in xs]))
    for ranks, count in zip(GRIDS, draws, strict=True):
        placement = Placement("cpu", ranks, P_world)
        # Ranks outside the placement do not have the graph of a gradient.
        twice = double and placement.partition.size == P_world.size
        drawn = [
            [
                cut_somewhere(
                    chosen.choice(attributes(x, placement.axes)), placement.shape, x.shape, chosen
                )
                for x in xs
            ]
            for _ in range(count)
        ]
        for sbps in drawn[: math.ceil(DRAWS * count)]:
            assert_matches(function, xs, placement, sbps, twice)
