"""Windows in sequence: each tap of a window is computed by the previous window."""

from __future__ import annotations

from hypothesis import assume, given, strategies as st

from gpudist.geometry import (
    Blocks,
    ComposedWindow,
    Decomposition,
    PaddingWindow,
    PoolWindow,
    SlidingWindow,
    TransposedWindow,
    Window,
)
from gpudist.geometry.halo import Halo, needed_range, plan_halo, reads_own_cells
from tests.geometry.oracle import assert_linear_operator, carry_out, cut, exactly, numbered
from tests.geometry.strategies import cuts, sliding_windows, transposed_windows


@st.composite
def pads(draw: st.DrawFn, extent: int) -> PaddingWindow:
    left = draw(st.integers(-1, 4))
    return PaddingWindow(left, draw(st.integers(max(-1, 1 - extent - left), 4)))


@st.composite
def pools(draw: st.DrawFn, extent: int) -> PoolWindow:
    sliding = draw(sliding_windows(extent))
    return PoolWindow(sliding.kernel, sliding.stride, sliding.dilation, sliding.padding, True)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Blocks, ComposedWindow]:
    """Up to four windows of any kind, over cells that are cut anyhow."""
    inputs = draw(cuts(draw(st.integers(1, 14)), 5))
    windows: list[Window] = []
    extent = inputs.extent
    for _ in range(draw(st.integers(1, 4))):
        kinds = (sliding_windows, transposed_windows, pads, pools)
        windows.append(draw(draw(st.sampled_from(kinds))(extent)))
        extent = windows[-1].outputs(Blocks(extent, 1)).extent
        assume(0 < extent < 60)
    return inputs, ComposedWindow(tuple(windows))


def taps(window: Window, output: int) -> set[int]:
    """Return the inputs of an output, including padding."""
    if isinstance(window, TransposedWindow):
        reached = output + window.padding
        return {
            (reached - tap * window.dilation) // window.stride
            for tap in range(window.kernel)
            if (reached - tap * window.dilation) % window.stride == 0
        }
    if isinstance(window, PaddingWindow):
        return {output - window.left}
    assert isinstance(window, SlidingWindow)
    first = output * window.stride - window.padding[0]
    return {first + tap * window.dilation for tap in range(window.kernel)}


@exactly
@given(chains())
def test_every_range_holds_what_the_next_one_reads(case: tuple[Blocks, ComposedWindow]) -> None:
    inputs, composed = case
    outputs = composed.outputs(inputs)
    for index in range(inputs.parts):
        start, stop = outputs.block(index)
        reads = composed.reads(start, stop, inputs.extent)
        assert reads[-1].outputs == (start, stop)
        assert [read.outputs for read in reads[:-1]] == [read.inside for read in reads[1:]]
        assert reads[0].extent == inputs.extent
        assert reads[0].inside == needed_range(inputs, composed, index)
        assert start < stop or all(read.needed[0] == read.needed[1] for read in reads)
        read_cells = set(range(start, stop))
        for window, read in zip(reversed(composed.windows), reversed(reads), strict=True):
            used = {cell for output in read_cells for cell in taps(window, output)}
            inside = {cell for cell in used if 0 <= cell < read.extent}
            assert inside <= set(range(*read.inside))
            if not isinstance(window, TransposedWindow):
                assert used <= set(range(*read.needed))
            assert min(read.overhang) >= 0
            length = read.needed[1] - read.needed[0]
            assert sum(read.overhang) + read.inside[1] - read.inside[0] == length
            read_cells = inside


@exactly
@given(chains())
def test_the_halo_of_a_chain_is_a_linear_operator(case: tuple[Blocks, ComposedWindow]) -> None:
    inputs, composed = case
    cells = Decomposition((inputs,))
    plans = [plan_halo(cells, Halo((composed,)), (index,)) for index in range(inputs.parts)]
    whole = numbered(cells.shape)
    found = carry_out(plans, [whole[cells.block((i,)).slices] for i in range(inputs.parts)])
    ranges = [needed_range(inputs, composed, index) for index in range(inputs.parts)]
    for block, needed in zip(found, ranges, strict=True):
        assert block.tolist() == cut(whole, (needed,), (False,)).tolist()
    assert_linear_operator(plans)
    blocks = [inputs.block(index) for index in range(inputs.parts)]
    assert reads_own_cells(inputs, composed) == (ranges == blocks)


def test_padding_in_the_middle_is_not_computed() -> None:
    """Two convolutions with one cell of padding: at the edge, neither reads beyond it."""
    window = SlidingWindow(3, padding=(1, 1))
    first, second = ComposedWindow((window, window)).reads(0, 4, 8)
    assert (second.needed, second.inside, second.overhang) == ((-1, 5), (0, 5), (1, 0))
    assert (first.outputs, first.needed, first.inside) == ((0, 5), (-1, 6), (0, 6))


def test_outputs_of_padding_alone_need_nothing_before() -> None:
    wide = SlidingWindow(2, padding=(6, 6))
    first, second = ComposedWindow((SlidingWindow(1), wide)).reads(0, 3, 4)
    assert (second.inside, second.overhang) == ((0, 0), (4, 0))
    assert first.outputs == first.inside == (0, 0)
