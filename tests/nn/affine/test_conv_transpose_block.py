"""Taps of a thin block that contribute to no output have gradients of zero, in every dtype."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gpudist.geometry.windows import TransposedWindow
from gpudist.nn.affine.conv_transpose_block import transposed_block

WINDOWS = [
    TransposedWindow(kernel, stride, dilation)
    for kernel, stride, dilation in product((1, 2, 3, 4), (1, 2, 3), (1, 2))
]


def _leave_large_numbers_in_free_memory() -> None:
    for size in (256, 512, 1024, 2048, 4096):
        held = [torch.full((size,), 1e30) for _ in range(32)]
        del held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_idle_taps(window: TransposedWindow, dtype: torch.dtype) -> None:
    for cells, first, count in product((1, 2, 3), (0, 1, 2, 3), (1, 2)):
        taps = range(window.kernel)
        reached = [
            [i * window.stride + tap * window.dilation for i in range(cells)] for tap in taps
        ]
        uses = [sum(first <= output < first + count for output in one) for one in reached]
        if not any(uses):
            # A worker with such outputs needs no cells.
            continue
        block = transposed_block([window], [(first, first + count)], [(0, cells)], (2, 8), 1)
        x = torch.ones(2, 16, cells, dtype=dtype)
        weight = torch.ones(16, 8, window.kernel, dtype=dtype, requires_grad=True)
        _leave_large_numbers_in_free_memory()
        y = block(x, weight)
        y.backward(torch.ones_like(y))
        assert weight.grad is not None
        expected = 2 * torch.tensor(uses, dtype=dtype)
        assert (weight.grad == expected).all(), (cells, first, count)
