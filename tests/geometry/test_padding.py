"""Windows over padding that copies cells, against NumPy's padding of the cells' numbers."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from gpudist.errors import ShapeError
from gpudist.geometry import Blocks, Decomposition, FoldedWindow, PaddingWindow, SlidingWindow
from gpudist.geometry.halo import Halo, needed_range, plan_halo
from gpudist.geometry.windows import CopyingMode, require_padding_fits
from tests.geometry.oracle import assert_linear_operator, carry_out, exactly, numbered

NUMPY: dict[str, Literal["reflect", "edge"]] = {"reflect": "reflect", "replicate": "edge"}


@st.composite
def padded(draw: st.DrawFn) -> tuple[Blocks, SlidingWindow, CopyingMode]:
    """Blocks, a window over them that fits, and how its padding is filled."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    inputs = Blocks.of_sizes(sizes)
    assume(inputs.extent > 0)
    mode: CopyingMode = draw(st.sampled_from(("reflect", "replicate")))
    widest = st.integers(0, inputs.extent - 1 if mode == "reflect" else 9)
    padding = (draw(widest), draw(widest))
    window = SlidingWindow(
        draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), padding
    )
    assume(inputs.extent + sum(padding) >= window.reach)
    return inputs, window, mode


def cells_read(inputs: Blocks, window: SlidingWindow, mode: CopyingMode, index: int) -> list[int]:
    """Return the cells that a worker's outputs read, including those between taps."""
    cells = np.pad(np.arange(inputs.extent), window.padding, NUMPY[mode])
    start, stop = window.outputs(inputs).block(index)
    first, last = start * window.stride, (stop - 1) * window.stride + window.reach
    return cells[first:last].tolist() if start < stop else []


@exactly
@given(padded())
def test_needed_ranges_hold_what_is_read_and_lie_inside(case):
    inputs, window, mode = case
    folded = FoldedWindow(window, mode)
    for index in range(inputs.parts):
        low, high = needed_range(inputs, folded, index)
        read = cells_read(inputs, window, mode, index)
        assert set(read) <= set(range(low, high))
        assert (low < high) == bool(read)
        if not read:
            continue
        assert 0 <= low < high <= inputs.extent
        if mode == "replicate":
            assert (low, high) == (min(read), max(read) + 1)
            continue
        # Near an edge, as far as the mirrored padding goes.
        front, behind = window.padding
        mirrored_in_front = low == 0 and min(read) <= front
        mirrored_behind = high == inputs.extent and max(read) >= inputs.extent - 1 - behind
        assert low == min(read) or mirrored_in_front or low >= inputs.extent - 1 - behind
        assert high == max(read) + 1 or mirrored_behind or high <= front + 1


@exactly
@given(padded())
def test_needed_ranges_grow_with_the_outputs(case):
    inputs, window, mode = case
    folded = FoldedWindow(window, mode)
    outputs = window.outputs(inputs).extent
    ranges = [folded.needed(m, m + 1, inputs.extent) for m in range(outputs)]
    for (low, high), (next_low, next_high) in pairwise(ranges):
        assert low <= next_low and high <= next_high
    lows, highs = zip(*ranges, strict=True)
    for start in range(outputs):
        for stop in range(start + 1, outputs + 1):
            assert folded.needed(start, stop, inputs.extent) == (lows[start], highs[stop - 1])


@exactly
@given(padded(), padded())
def test_plans_bring_every_needed_cell(first, second):
    inputs = Decomposition((first[0], second[0]))
    windows = tuple(FoldedWindow(window, mode) for _, window, mode in (first, second))
    array = numbered(inputs.shape)
    workers = list(product(*map(range, inputs.grid)))
    blocks = [array[inputs.block(index).slices] for index in workers]
    for nested in (False, True):
        plans = [plan_halo(inputs, Halo(windows, nested=nested), index) for index in workers]
        for index, output in zip(workers, carry_out(plans, blocks), strict=True):
            ranges = map(needed_range, inputs.dims, windows, index)
            np.testing.assert_array_equal(output, array[tuple(slice(*cells) for cells in ranges)])
    if inputs.shape[0] * inputs.shape[1] < 25:
        assert_linear_operator(plans)


@pytest.mark.parametrize(
    "mode, extent, parts, window, ranges",
    [
        ("reflect", 9, 3, (3, 1, 1, (1, 1)), [(0, 4), (2, 7), (5, 9)]),
        ("replicate", 9, 3, (3, 1, 1, (1, 1)), [(0, 4), (2, 7), (5, 9)]),
        # The mirrored cells are the neighbour's.
        ("reflect", 8, 4, (7, 1, 1, (3, 3)), [(0, 5), (0, 7), (1, 8), (3, 8)]),
        # The first and last workers read padding only.
        ("replicate", 2, 4, (1, 1, 1, (3, 3)), [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ("reflect", 4, 5, (1, 1, 1, (3, 3)), [(0, 4), (0, 4), (0, 4), (0, 4), (0, 4)]),
        # The padding behind is not read: two outputs, at cells -1 and 2.
        ("reflect", 6, 2, (3, 4, 1, (1, 1)), [(0, 2), (3, 6)]),
    ],
)
def test_golden_cases(mode, extent, parts, window, ranges):
    folded = FoldedWindow(SlidingWindow(*window), mode)
    inputs = Blocks(extent, parts)
    assert [needed_range(inputs, folded, index) for index in range(parts)] == ranges


def test_padding_window():
    window = PaddingWindow(2, -1)
    assert window.outputs(Blocks(5, 2)) == Blocks(6, 2)
    assert window.needed(0, 3, 5) == (-2, 1)
    assert window.needed(3, 6, 5) == (1, 4)
    with pytest.raises(ShapeError):
        PaddingWindow(-3, -3).outputs(Blocks(5, 2))
    folded = FoldedWindow(PaddingWindow(-5, 3), "reflect")
    assert folded.needed(0, 2, 4) == (0, 4)


def test_padding_that_does_not_fit_is_refused():
    for mode, padding, extent in (
        ("reflect", (4, 0), 4),
        ("reflect", (0, 0), 0),
        ("reflect", (-2, -2), 4),
        ("replicate", (0, 1), 0),
        ("replicate", (-4, 0), 4),
        ("circular", (0, 5), 4),
        ("circular", (-3, -2), 4),
        ("constant", (-5, 7), 4),
        ("zeros", (-3, -2), 4),
    ):
        with pytest.raises(ShapeError, match=rf"\({padding[0]}, {padding[1]}\).*{extent}"):
            require_padding_fits(mode, padding, extent)
    for mode, padding, extent in (
        ("reflect", (3, 3), 4),
        ("reflect", (-4, 3), 4),
        ("replicate", (9, -5), 4),
        ("circular", (4, 4), 4),
        ("circular", (0, 0), 0),
        ("constant", (-2, -2), 4),
        ("zeros", (9, 0), 0),
    ):
        require_padding_fits(mode, padding, extent)
    with pytest.raises(ShapeError, match="less than the global extent 3"):
        FoldedWindow(SlidingWindow(3, padding=(3, 3)), "reflect").outputs(Blocks(3, 2))


@pytest.mark.parametrize(
    ("mode", "padding", "extent"),
    [
        ("reflect", (1, 0), 1),
        ("reflect", (0, 1), 1),
        ("constant", (1, -3), 2),
        ("constant", (-3, 1), 2),
    ],
)
def test_padding_that_does_not_fit_by_one_cell(mode: str, padding: tuple[int, int], extent: int):
    require_padding_fits(mode, padding, extent + 1)
    with pytest.raises(ShapeError):
        require_padding_fits(mode, padding, extent)
