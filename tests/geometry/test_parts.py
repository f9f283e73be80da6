from __future__ import annotations

from hypothesis import given, strategies as st

from gpudist.geometry import AdaptiveWindow, Blocks, PartsWindow
from gpudist.geometry.halo import needed_range
from tests.geometry.oracle import exactly

cuts = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any).map(Blocks.of_sizes)
windows = st.integers(1, 20).map(AdaptiveWindow)


def cells_of(window: AdaptiveWindow, output: int, extent: int) -> set[int]:
    """Return the cells by definition, in exact fractions of the extent."""
    outputs = window.output_extent
    return {
        c
        for c in range(extent)
        if (c + 1) * outputs > output * extent and c * outputs < (output + 1) * extent
    }


@exactly
@given(cuts, windows)
def test_an_adaptive_window_is_what_its_share_of_the_extent_meets(
    inputs: Blocks, window: AdaptiveWindow
) -> None:
    outputs = window.outputs(inputs)
    assert outputs == Blocks(window.output_extent, inputs.parts)
    for i in range(outputs.parts):
        start, stop = outputs.block(i)
        if start < stop:
            cells = set().union(*[cells_of(window, o, inputs.extent) for o in range(start, stop)])
            assert set(range(*window.needed(start, stop, inputs.extent))) == cells


@exactly
@given(cuts, windows)
def test_an_output_is_made_of_all_its_cells_once(inputs: Blocks, window: AdaptiveWindow) -> None:
    parts_window = PartsWindow(inputs, window)
    parts: list[set[int]] = []
    lengths: list[int] = []
    for index in range(inputs.parts):
        first = inputs.block(index)[0]
        for (start, stop), length in zip(
            parts_window.own_cells(index), parts_window.own_lengths(index), strict=True
        ):
            assert 0 <= start < stop <= inputs.length(index)
            parts.append(set(range(first + start, first + stop)))
            assert len(parts[-1]) <= length
            lengths.append(length)
        assert len(parts) == parts_window.parts.block(index)[1]
    outputs = parts_window.outputs(parts_window.parts)
    for index in range(inputs.parts):
        first = needed_range(parts_window.parts, parts_window, index)[0]
        for output, (start, stop) in zip(
            range(*outputs.block(index)), parts_window.own_parts(index), strict=True
        ):
            of_output = parts[first + start : first + stop]
            cells = cells_of(window, output, inputs.extent)
            assert set().union(*of_output) == cells
            assert set(lengths[first + start : first + stop]) == {len(cells)}
            assert sum(map(len, of_output)) == len(cells)


@exactly
@given(cuts, windows)
def test_a_worker_has_few_more_parts_than_its_share(inputs: Blocks, window: AdaptiveWindow) -> None:
    parts = PartsWindow(inputs, window).parts
    for index in range(inputs.parts):
        share = -(-inputs.length(index) * window.output_extent // inputs.extent)
        assert parts.length(index) <= share + 1


def test_nothing_moves_where_windows_keep_to_blocks() -> None:
    assert not PartsWindow(Blocks(12, 3), AdaptiveWindow(6)).moves
    assert not PartsWindow(Blocks(7, 1), AdaptiveWindow(3)).moves
    assert PartsWindow(Blocks(12, 3), AdaptiveWindow(4)).moves
    assert PartsWindow(Blocks.of_sizes([4, 8]), AdaptiveWindow(3)).moves
    assert not PartsWindow(Blocks.of_sizes([8, 4]), AdaptiveWindow(3)).moves


def test_a_global_window_has_one_part_a_worker() -> None:
    window = PartsWindow(Blocks(11, 3), AdaptiveWindow(1))
    assert window.parts == Blocks(3, 3)
    assert window.own_cells(1) == [(0, 4)]
    assert window.own_lengths(1) == [11]
    assert needed_range(window.parts, window, 0) == (0, 3)
    assert window.own_parts(0) == [(0, 3)]
    assert window.own_parts(1) == []
