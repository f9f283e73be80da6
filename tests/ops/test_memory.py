"""The paper's operators on memory are matrices; autograd through them applies the transposes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpudist import ops

Pair = tuple[torch.Tensor, torch.Tensor]

MATRICES = {
    ops.add: [[1, 0], [1, 1]],
    ops.add_adjoint: [[1, 1], [0, 1]],
    ops.copy: [[1, 0], [1, 0]],
    ops.copy_adjoint: [[1, 1], [0, 0]],
    ops.move: [[0, 0], [1, 0]],
    ops.move_adjoint: [[0, 1], [0, 0]],
}
every_operator = pytest.mark.parametrize(
    "operator, matrix", MATRICES.items(), ids=[f.__name__ for f in MATRICES]
)  # fmt: skip


@every_operator
def test_applies_its_matrix(operator: Callable[..., Pair], matrix: list[list[int]]) -> None:
    a, b = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])
    outputs = operator(a, b)
    for (left, right), output in zip(matrix, outputs, strict=True):
        assert torch.equal(output, left * a + right * b)
        assert output.data_ptr() not in (a.data_ptr(), b.data_ptr())
    assert outputs[0].data_ptr() != outputs[1].data_ptr()
    assert torch.equal(a, torch.tensor([2.0, 3.0]))
    assert torch.equal(b, torch.tensor([5.0, 7.0]))


@every_operator
def test_backward_applies_the_transpose(
    operator: Callable[..., Pair], matrix: list[list[int]]
) -> None:
    jacobian = torch.autograd.functional.jacobian(operator, (torch.zeros(1), torch.zeros(1)))
    for i in range(2):
        for j in range(2):
            assert jacobian[i][j].item() == matrix[i][j]


@every_operator
def test_derivatives(operator: Callable[..., Pair], matrix: list[list[int]]) -> None:
    def cubed(a: torch.Tensor, b: torch.Tensor) -> Pair:
        first, second = operator(a, b)
        return first**3, second**3

    inputs = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(cubed, inputs)
    assert torch.autograd.gradgradcheck(cubed, inputs)


def test_clear() -> None:
    a = torch.randn(3, dtype=torch.float64, requires_grad=True)
    cleared = ops.clear(a)
    assert torch.equal(cleared, torch.zeros(3, dtype=torch.float64))
    assert cleared.data_ptr() != a.data_ptr()
    (gradient,) = torch.autograd.grad(cleared.sum(), a)
    assert torch.equal(gradient, torch.zeros(3, dtype=torch.float64))
    assert torch.autograd.gradcheck(ops.clear, [a])


def test_compositions_of_the_paper() -> None:
    """A move is a copy, then a clear of the source; the adjoint of a copy an add, then a clear."""
    a, b = torch.tensor([2.0]), torch.tensor([5.0])
    first, second = ops.copy(a, b)
    assert [t.item() for t in (ops.clear(first), second)] == [t.item() for t in ops.move(a, b)]
    first, second = ops.add_adjoint(a, b)
    assert [first.item(), ops.clear(second).item()] == [t.item() for t in ops.copy_adjoint(a, b)]
