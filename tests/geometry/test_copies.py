"""Copies within a block, against NumPy's indexing of the cells' numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.geometry.copies import MOST_BOXES, Run, plan_copies, runs_of
from tests.geometry.oracle import assert_linear_operator, carry_out, exactly, numbered


@st.composite
def orders(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, list[int]]]:
    """Shape of a block, and the cells of the result along some of its dims."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    return shape, {d: draw(st.lists(st.integers(0, shape[d] - 1), max_size=6)) for d in dims}


@exactly
@given(orders(), st.sampled_from((1, 4, MOST_BOXES)))
def test_cells_are_copied_in_order(case, most):
    shape, cells = case
    plan = plan_copies(shape, {d: runs_of(order) for d, order in cells.items()}, 0, most)
    array = numbered(shape)
    (output,) = carry_out([plan], [array])
    indices = [cells.get(d, range(extent)) for d, extent in enumerate(shape)]
    np.testing.assert_array_equal(output, array[np.ix_(*indices)])
    assert_linear_operator([plan])


def test_runs_are_as_long_as_possible():
    assert runs_of([2, 1, 0, 1, 2, 3, 3]) == [
        Run(2, 0, 1), Run(1, 1, 1), Run(0, 2, 4), Run(3, 6, 1)
    ]  # fmt: skip
    assert runs_of([]) == []


@pytest.mark.parametrize(("width", "stages"), [(1, 1), (7, 1), (8, 2)])
def test_dims_are_copied_together_while_there_are_few_boxes(width: int, stages: int):
    runs = runs_of([abs(cell) for cell in range(-width, 9)] + [8] * width)
    plan = plan_copies((2, 9, 9), {1: runs, 2: runs}, 0)
    assert len(plan.stages) == stages
    assert all(len(stage.moves) <= MOST_BOXES for stage in plan.stages)


def test_only_repeated_cells_have_sums():
    shifted, repeated = plan_copies((4,), {0: runs_of([2, 3, 0])}, 0), runs_of([2, 3, 3])
    assert not shifted.T.stages[0].destinations_overlap
    assert plan_copies((4,), {0: repeated}, 0).T.stages[0].destinations_overlap
