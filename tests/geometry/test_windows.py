from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.errors import ShapeError
from gpudist.geometry import Blocks, HaloWidths, SlidingWindow, TransposedWindow
from gpudist.geometry.windows import PaddedWindow
from tests.geometry.oracle import exactly
from tests.geometry.strategies import halo_widths, sliding_windows, transposed_windows

extents = st.integers(1, 14)
parts = st.integers(1, 6)
sliding_cases = extents.flatmap(lambda n: st.tuples(st.just(n), parts, sliding_windows(n)))
transposed_cases = extents.flatmap(lambda n: st.tuples(st.just(n), parts, transposed_windows(n)))


def nonempty(outputs: Blocks) -> list[tuple[int, int]]:
    ranges = [outputs.block(index) for index in range(outputs.parts)]
    return [(start, stop) for start, stop in ranges if start < stop]


def taps(window: SlidingWindow, output: int) -> list[int]:
    """Input cells of one output."""
    first = output * window.stride - window.padding[0]
    return [first + t * window.dilation for t in range(window.kernel)]


@exactly
@given(sliding_cases)
def test_a_sliding_window_has_every_output_whose_taps_are_all_there(
    case: tuple[int, int, SlidingWindow],
):
    extent, count, window = case
    outputs = window.outputs(Blocks(extent, count))
    assert outputs == Blocks(outputs.extent, count)
    last = extent + window.padding[1]
    assert max(taps(window, outputs.extent - 1)) < last <= max(taps(window, outputs.extent))


@exactly
@given(sliding_cases)
def test_a_sliding_window_needs_all_cells_between_its_outer_taps(
    case: tuple[int, int, SlidingWindow],
):
    extent, count, window = case
    for start, stop in nonempty(window.outputs(Blocks(extent, count))):
        read = [cell for output in range(start, stop) for cell in taps(window, output)]
        assert window.needed(start, stop, extent) == (min(read), max(read) + 1)


@exactly
@given(sliding_cases)
def test_a_padded_window_leaves_out_the_padding_of_both_sides(
    case: tuple[int, int, SlidingWindow],
):
    extent, count, window = case
    padded = PaddedWindow(window)
    outputs = window.outputs(Blocks(extent, count))
    assert padded.outputs(Blocks(extent, count)) == outputs
    for start, stop in nonempty(outputs):
        low, high = padded.needed(start, stop, extent)
        padding = padded.padding_of(start, stop, extent)
        assert (low - padding, high + padding) == window.needed(start, stop, extent)
        assert padding == 0 or (low <= 0 and high >= extent)
        assert low >= 0 or high <= extent
    ranges = [padded.needed(*outputs.block(i), extent) for i in range(count)]
    assert ranges == sorted(ranges) and sorted(high for _, high in ranges) == [h for _, h in ranges]


@exactly
@given(transposed_cases)
def test_a_transposed_window_needs_the_inputs_whose_reach_meets_its_outputs(
    case: tuple[int, int, TransposedWindow],
):
    extent, count, window = case
    span = window.dilation * (window.kernel - 1)
    for start, stop in nonempty(window.outputs(Blocks(extent, count))):
        reached = [i * window.stride - window.padding for i in range(extent)]
        read = [i for i, first in enumerate(reached) if first < stop and first + span >= start]
        low, high = window.needed(start, stop, extent)
        assert 0 <= low <= high <= extent
        assert list(range(low, high)) == read


def transpose_convolve(
    values: np.ndarray, weights: np.ndarray, window: TransposedWindow
) -> np.ndarray:
    """All outputs without padding: input i adds to i * stride + tap * dilation."""
    result = np.zeros(
        max(0, (len(values) - 1) * window.stride + window.dilation * (window.kernel - 1) + 1),
        dtype=int,
    )
    for i, value in enumerate(values):
        for tap, weight in enumerate(weights):
            result[i * window.stride + tap * window.dilation] += value * weight
    return result


@exactly
@given(transposed_cases)
def test_needed_inputs_alone_give_the_block_of_a_transposed_convolution(
    case: tuple[int, int, TransposedWindow],
):
    extent, count, window = case
    values = np.arange(1, extent + 1) ** 2
    weights = np.arange(1, window.kernel + 1) * 7 + 1
    outputs = window.outputs(Blocks(extent, count))
    whole = np.zeros(outputs.extent + 2 * window.padding, dtype=int)
    everything = transpose_convolve(values, weights, window)[: len(whole)]
    whole[: len(everything)] = everything
    whole = whole[window.padding : window.padding + outputs.extent]
    for start, stop in nonempty(outputs):
        low, high = window.needed(start, stop, extent)
        block = np.zeros(stop - start, dtype=int)
        reached = transpose_convolve(values[low:high], weights, window)
        first, last = window.reached(low, high)
        assert last - first == len(reached) or low == high
        for cell, value in enumerate(reached, first):
            if start <= cell < stop:
                block[cell - start] = value
        np.testing.assert_array_equal(block, whole[start:stop])


@exactly
@given(halo_widths, st.integers(0, 9), st.integers(0, 9))
def test_halo_widths_never_make_a_range_negative(halo: HaloWidths, start: int, length: int):
    low, high = halo.needed(start, start + length, 20)
    assert low == start - halo.left
    assert high - low == max(0, length + halo.left + halo.right)


@pytest.mark.parametrize(
    ("window", "extent", "outputs"),
    [
        (SlidingWindow(5, padding=(2, 2)), 11, 11),
        (SlidingWindow(5), 11, 7),
        (SlidingWindow(2, stride=2), 11, 5),
        (SlidingWindow(3, dilation=4, padding=(0, 1)), 8, 1),
        (TransposedWindow(4, stride=2, padding=1), 5, 10),
        (TransposedWindow(3, stride=2, padding=1, output_padding=1), 5, 10),
        (TransposedWindow(2, stride=3, dilation=2), 4, 12),
    ],
)
def test_output_extents_are_torchs(window: SlidingWindow | TransposedWindow, extent, outputs):
    assert window.output_extent(extent) == outputs


def test_a_kernel_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ShapeError, match="needs 9 cells but the padded global extent is 8"):
        SlidingWindow(5, dilation=2, padding=(1, 0)).output_extent(7)
    with pytest.raises(ShapeError, match="no output for 2 cells"):
        TransposedWindow(1, padding=1).output_extent(2)
    with pytest.raises(ShapeError, match="no output for 0 cells"):
        TransposedWindow(3).output_extent(0)


@pytest.mark.parametrize("parameters", [(0, 1, 1), (3, 0, 1), (3, 1, 0)])
def test_parameters_below_one_are_refused(parameters: tuple[int, int, int]):
    for kind in (SlidingWindow, TransposedWindow):
        with pytest.raises(ShapeError, match="must be at least 1"):
            kind(*parameters)


def test_negative_padding_is_refused():
    with pytest.raises(ShapeError):
        SlidingWindow(3, padding=(0, -1))
    with pytest.raises(ShapeError):
        TransposedWindow(3, padding=-1)
    with pytest.raises(ShapeError):
        TransposedWindow(3, output_padding=-1)
