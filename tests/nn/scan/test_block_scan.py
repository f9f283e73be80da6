"""The recurrence on one worker, in chunks, equals the one step by step."""

from __future__ import annotations

import pytest
import torch

from gpudist.nn.scan.block_scan import CELLS, MATRICES, block_scan
from tests.nn.scan.scan_cases import Form, step_by_step


@pytest.mark.parametrize(
    ("steps", "matrix"), [(1, True), (32, False), (33, True), (75, False), (1100, False)]
)
def test_chunks(steps: int, matrix: bool) -> None:
    torch.manual_seed(0)
    shape = (2, 2) if matrix else (2, 1)
    a = torch.rand(steps, *shape, dtype=torch.float64).sub(0.5).requires_grad_()
    b = torch.randn(steps, 2, 3, dtype=torch.float64, requires_grad=True)
    states = block_scan(a, b, torch.zeros_like(b[0]), MATRICES if matrix else CELLS)
    form = Form(tuple(a.shape), tuple(b.shape), 1, matrix)
    expected = step_by_step(a.unsqueeze(0), b.unsqueeze(0), form, False, None)[0]
    torch.testing.assert_close(states, expected)
    g = torch.randn_like(states)
    torch.testing.assert_close(
        torch.autograd.grad(states, (a, b), g), torch.autograd.grad(expected, (a, b), g)
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("matrix", [False, True])
def test_derivatives(matrix: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = torch.randn(4, 2, 2 if matrix else 1, dtype=dtype, requires_grad=True)
    b = torch.randn(4, 2, 1, dtype=dtype, requires_grad=True)
    before = torch.randn(2, 1, dtype=dtype, requires_grad=True)
    product = MATRICES if matrix else CELLS

    def scan(a: torch.Tensor, b: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return block_scan(a, b, before, product)

    assert torch.autograd.gradcheck(scan, (a, b, before), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(scan, (a, b, before), fast_mode=True)
