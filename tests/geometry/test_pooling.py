from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, strategies as st

from gpudist.errors import ShapeError
from gpudist.geometry import PoolWindow
from tests.geometry.oracle import exactly

numbers = st.integers(1, 6)
windows = st.builds(
    lambda kernel, stride, dilation, padding, ceil: PoolWindow(
        kernel, stride, dilation, (min(padding, kernel // 2),) * 2, ceil
    ),
    numbers, numbers, st.integers(1, 3), st.integers(0, 3), st.booleans(),
)  # fmt: skip


def outputs_of_torch(window: PoolWindow, extent: int) -> int:
    pool = torch.nn.MaxPool1d(
        window.kernel, window.stride, window.padding[0], window.dilation, False, window.ceil_mode
    )
    return pool(torch.zeros(1, extent)).shape[-1]


@exactly
@given(st.integers(1, 14), windows)
def test_a_pool_has_as_many_outputs_as_torch_says(extent: int, window: PoolWindow) -> None:
    try:
        expected = outputs_of_torch(window, extent)
    except RuntimeError:
        with pytest.raises(ShapeError):
            window.output_extent(extent)
    else:
        assert window.output_extent(extent) == expected


@exactly
@given(st.integers(1, 14), windows)
def test_windows_hold_only_padding_as_their_taps_say(extent: int, window: PoolWindow) -> None:
    try:
        outputs = window.output_extent(extent)
    except ShapeError:
        assume(False)
        return
    taps = [
        [o * window.stride - window.padding[0] + t * window.dilation for t in range(window.kernel)]
        for o in range(outputs)
    ]
    only_padding = any(all(not 0 <= tap < extent for tap in of_output) for of_output in taps)
    assert window.has_only_padding(extent) == only_padding


def test_the_first_window_may_have_padding_alone() -> None:
    """Taps at -1 and 1 of one cell."""
    assert PoolWindow(2, 2, 2, (1, 1), False).has_only_padding(1)
    assert not PoolWindow(2, 2, 2, (1, 1), False).has_only_padding(2)
