"""Random geometry: cuts with empty blocks, windows of every kind, rank sets that overlap."""

from __future__ import annotations

from hypothesis import strategies as st

from gpudist.geometry import (
    Blocks,
    Decomposition,
    HaloWidths,
    SlidingWindow,
    TransposedWindow,
    Window,
)

_MOST_PARTS = {1: 6, 2: 4, 3: 2}
_MOST_CELLS = {1: 14, 2: 7, 3: 4}


@st.composite
def cuts(draw: st.DrawFn, extent: int, most_parts: int = 4) -> Blocks:
    """A cut of ``extent`` cells: balanced, or of explicit sizes with empty blocks among them."""
    return draw(cuts_in(extent, draw(st.integers(1, most_parts))))


@st.composite
def cuts_in(draw: st.DrawFn, extent: int, parts: int) -> Blocks:
    if draw(st.booleans()):
        return Blocks(extent, parts)
    inner = draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1))
    stops = [*sorted(inner), extent]
    starts = [0, *stops[:-1]]
    return Blocks.of_sizes([stop - start for start, stop in zip(starts, stops, strict=True)])


@st.composite
def decompositions(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Decomposition:
    """A cut of a tensor with 1 to 3 dims, some extents smaller than the number of workers."""
    shape = draw(shapes()) if shape is None else shape
    return Decomposition(tuple(draw(cuts(n, _MOST_PARTS[len(shape)])) for n in shape))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    dim = draw(st.integers(1, 3))
    return tuple(draw(st.integers(0, _MOST_CELLS[dim])) for _ in range(dim))


@st.composite
def sliding_windows(draw: st.DrawFn, extent: int) -> SlidingWindow:
    """Return a kernel that fits ``extent`` cells with their padding."""
    least = 0 if extent else 1
    padding = (draw(st.integers(least, 3)), draw(st.integers(0, 3)))
    dilation = draw(st.integers(1, 3))
    taps = (extent + sum(padding) - 1) // dilation + 1
    kernel = draw(st.integers(1, min(taps, 6)))
    return SlidingWindow(kernel, draw(st.integers(1, 4)), dilation, padding)


@st.composite
def transposed_windows(draw: st.DrawFn, extent: int) -> TransposedWindow:
    """Return a transposed window that leaves at least one output for ``extent >= 1`` cells."""
    kernel, stride, dilation = (draw(st.integers(1, 4)) for _ in range(3))
    behind = draw(st.integers(0, 2))
    outputs = (extent - 1) * stride + dilation * (kernel - 1) + 1 + behind
    padding = draw(st.integers(0, min(3, (outputs - 1) // 2)))
    return TransposedWindow(kernel, stride, dilation, padding, behind)


halo_widths = st.builds(HaloWidths, st.integers(-3, 7), st.integers(-3, 7))


def windows(extent: int) -> st.SearchStrategy[Window]:
    kinds: list[st.SearchStrategy[Window]] = [halo_widths, sliding_windows(extent)]
    if extent:
        kinds.append(transposed_windows(extent))
    return st.one_of(kinds)


@st.composite
def workers(draw: st.DrawFn, size: int, world: int) -> list[int]:
    """``size`` different ranks of a world of ``world``, in any order."""
    return draw(st.permutations(range(world)))[:size]
