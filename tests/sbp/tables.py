"""Families of operators against their tables, and against torch for whatever attributes."""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from gpudist.partition import Partition
from gpudist.sbp import Placement, explain
from gpudist.sbp.attributes import NdSbp, Sbp
from tests.sbp.compare import Function, assert_matches
from tests.sbp.parts import B, P, S

GRIDS: list[Any] = [range(8), [[0, 1, 2], [3, 4, 5]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]
Row = tuple[Sequence[Sbp], Sbp]


def attributes(x: torch.Tensor, axes: int = 1) -> list[NdSbp]:
    """All that a tensor may have; of integers the tests make no terms."""
    ones = [*map(S, range(x.dim())), B]
    return list(product([*ones, P] if x.is_floating_point() else ones, repeat=axes))


def assert_table(
    P_world: Partition, function: Function, xs: Sequence[torch.Tensor], rows: Sequence[Row]
) -> None:
    """On one axis, inputs as a row says give outputs as it says, and nothing is boxed before."""
    placement = Placement("cpu", [0, 1, 2], P_world)
    for inputs, output in rows:
        with explain() as lines:
            outputs = assert_matches(function, xs, placement, [(one,) for one in inputs])
        assert lines and all(line.endswith("; 0 bytes boxed") for line in lines), lines
        assert {y.sbp for y in outputs} == {(output,)}, lines


def assert_everywhere(
    P_world: Partition,
    function: Function,
    xs: Sequence[torch.Tensor],
    draws: tuple[int, int, int] = (8, 5, 3),
    double: bool = True,
) -> None:
    """Drawn attributes on arrays of one, two and three axes: what does not fit is boxed."""
    chosen = python_random.Random(str([x.shape for x in xs]))
    for ranks, count in zip(GRIDS, draws, strict=True):
        placement = Placement("cpu", ranks, P_world)
        # Of a gradient, ranks outside the placement do not have the graph.
        twice = double and placement.partition.size == P_world.size
        for _ in range(count):
            sbps = [chosen.choice(attributes(x, placement.axes)) for x in xs]
            assert_matches(function, xs, placement, sbps, twice)
