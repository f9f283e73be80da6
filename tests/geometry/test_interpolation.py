from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.geometry import (
    AdaptiveWindow,
    Blocks,
    Decomposition,
    ExpandedWindow,
    Halo,
    InterpolationWindow,
    Window,
    plan_halo,
)
from tests.geometry.oracle import assert_linear_operator, carry_out, exactly, numbered
from tests.geometry.strategies import cuts

interpolations = st.builds(
    InterpolationWindow,
    st.sampled_from(["nearest", "nearest-exact", "linear", "cubic"]),
    st.integers(1, 30),
    st.none() | st.floats(0.2, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["general", "small", "cuda"]),
)
windows = (
    interpolations
    | st.builds(AdaptiveWindow, st.integers(1, 30))
    | st.builds(ExpandedWindow, st.integers(1, 4))
)


def read_by(window: Window, output: int, extent: int) -> list[int]:
    """Return the cells that one output reads."""
    if isinstance(window, InterpolationWindow):
        return window.cells(np.array([output]), extent)[:, 0].tolist()
    if isinstance(window, ExpandedWindow):
        return [output // window.factor]
    assert isinstance(window, AdaptiveWindow)
    # Cell i takes up [i, i + 1) of the extent, the output the same of a shorter scale.
    share = extent / window.output_extent
    whole = [
        i
        for i in range(extent)
        if (i + 1) * window.output_extent > output * extent
        and i * window.output_extent < (output + 1) * extent
    ]
    assert len(whole) >= share
    return whole


@exactly
@given(st.integers(1, 14).flatmap(lambda n: st.tuples(cuts(n), windows)))
def test_every_worker_gets_the_cells_from_its_first_to_its_last(case: tuple[Blocks, Window]):
    inputs, window = case
    array = numbered([inputs.extent])
    decomposition = Decomposition((inputs,))
    plans = [plan_halo(decomposition, Halo((window,)), [i]) for i in range(inputs.parts)]
    blocks = [array[slice(*inputs.block(i))] for i in range(inputs.parts)]
    outputs = window.outputs(inputs)
    assert outputs == Blocks(outputs.extent, inputs.parts)
    for i, found in enumerate(carry_out(plans, blocks)):
        read = [c for o in range(*outputs.block(i)) for c in read_by(window, o, inputs.extent)]
        expected = array[min(read) : max(read) + 1] if read else array[:0]
        np.testing.assert_array_equal(found, expected)
    assert_linear_operator(plans)


@exactly
@given(interpolations, st.integers(1, 20))
def test_taps_ascend_within_the_extent_and_weigh_one(window: InterpolationWindow, extent: int):
    cells, weights = window.taps(np.arange(window.size), extent)
    assert cells.shape == weights.shape and cells.min() >= 0 and cells.max() < extent
    assert (np.diff(cells, axis=0) >= 0).all() and (np.diff(cells, axis=1) >= 0).all()
    assert weights.dtype == (np.float32 if window.single else np.float64)
    np.testing.assert_allclose(weights.sum(0), 1, rtol=1e-5)


@exactly
@given(interpolations, st.integers(1, 9), st.integers(0, 4))
def test_an_exact_factor_gives_the_same_wherever_a_block_begins(
    window: InterpolationWindow, extent: int, shift: int
):
    factor = window.exact_factor(extent)
    if factor is None:
        return
    assert window.size == factor * extent
    longer = InterpolationWindow(
        window.mode, factor * (extent + shift), window.scale_factor, False, window.single,
        window.kernel,
    )  # fmt: skip
    cells, weights = window.taps(np.arange(window.size), extent)
    moved, same = longer.taps(np.arange(window.size) + shift * factor, extent + shift)
    inner = (cells[0] > 0) & (moved[0] > shift)
    if len(cells) == len(moved):
        np.testing.assert_array_equal(moved[:, inner], cells[:, inner] + shift)
        np.testing.assert_array_equal(same[:, inner], weights[:, inner])


@pytest.mark.parametrize(
    ("window", "extent", "factor"),
    [
        (InterpolationWindow("linear", 8), 2, 4),
        (InterpolationWindow("nearest", 8, 4.0), 2, 4),
        (InterpolationWindow("nearest", 2), 2, 1),
        (InterpolationWindow("linear", 6), 2, None),
        (InterpolationWindow("linear", 4), 8, None),
        (InterpolationWindow("linear", 8, 4.2), 2, None),
        (InterpolationWindow("linear", 8, align_corners=True), 2, None),
        (InterpolationWindow("linear", 1 << 23), 1 << 22, None),
    ],
)
def test_a_factor_is_exact_if_it_is_a_power_of_two(
    window: InterpolationWindow, extent: int, factor: int | None
):
    assert window.exact_factor(extent) == factor


# Worked by hand: input cells of each output.
GOLDEN = {
    "nearest 3 -> 6": (InterpolationWindow("nearest", 6), 3, [[0, 0, 1, 1, 2, 2]]),
    "nearest 5 -> 2": (InterpolationWindow("nearest", 2), 5, [[0, 2]]),
    "nearest-exact 5 -> 2": (InterpolationWindow("nearest-exact", 2), 5, [[1, 3]]),
    "few nearest-exact 5 -> 2": (
        InterpolationWindow("nearest-exact", 2, None, False, True, "small"),
        5,
        [[1, 3]],
    ),
    "linear 2 -> 4": (InterpolationWindow("linear", 4), 2, [[0, 0, 0, 1], [1, 1, 1, 1]]),
    "corners 3 -> 2": (InterpolationWindow("linear", 2, None, True), 3, [[0, 2], [1, 2]]),
    "one corner": (InterpolationWindow("linear", 1, None, True), 4, [[0], [1]]),
    "nearest 2 -> 4 by 2.3": (InterpolationWindow("nearest", 4, 2.3), 2, [[0, 0, 0, 1]]),
    "few nearest 2 -> 4 by 2.3": (
        InterpolationWindow("nearest", 4, 2.3, False, True, "small"),
        2,
        [[0, 0, 1, 1]],
    ),
}


@pytest.mark.parametrize(("window", "extent", "cells"), GOLDEN.values(), ids=GOLDEN.keys())
def test_cells(window: InterpolationWindow, extent: int, cells: list[list[int]]):
    assert window.cells(np.arange(window.size), extent).tolist() == cells


def test_a_float32_position_may_be_rounded_to_another_cell():
    """54 * 7 / 6 is 63, but float32 cannot represent 7 / 6."""
    outputs = np.arange(66)
    single, double = (
        InterpolationWindow("nearest", 66, None, False, single).cells(outputs, 77)[0]
        for single in (True, False)
    )
    assert np.flatnonzero(single != double).tolist() == [54]
    assert (single[54], double[54]) == (62, 63)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_no_outputs_need_no_inputs(mode: Literal["nearest", "linear", "cubic"]) -> None:
    window = InterpolationWindow(mode, 8)
    for start in range(9):
        first, last = window.needed(start, start, 4)
        assert first == last
