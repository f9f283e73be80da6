"""The paper's operators on memory are matrices; autograd through them applies the transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gpudist import ops

Pair = tuple[torch.Tensor, torch.Tensor]
Shapes = list[tuple[int, ...]]

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


def test_allocate_appends_zeros_of_any_shape() -> None:
    a = torch.tensor([2.0, 3.0])
    for shape, expected in ((None, (2,)), ([3, 1], (3, 1)), ([0], (0,))):
        kept, new = ops.allocate(a, shape)
        assert torch.equal(kept, a) and kept.data_ptr() != a.data_ptr()
        assert torch.equal(new, torch.zeros(expected))


def test_deallocate_drops_the_second_piece() -> None:
    a, b = torch.tensor([2.0, 3.0]), torch.ones(3, 1)
    kept = ops.deallocate(a, b)
    assert torch.equal(kept, a) and kept.data_ptr() != a.data_ptr()


def dot(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(((x * y).sum() for x, y in zip(left, right, strict=True)), torch.zeros(()))


# An operator, its adjoint, and the shapes of the pieces that each takes.
ADJOINTS = [
    (lambda a: ops.allocate(a, [3, 1]), ops.deallocate, [(2,)], [(2,), (3, 1)]),
    (ops.deallocate, lambda a: ops.allocate(a, [3, 1]), [(2,), (3, 1)], [(2,)]),
    (ops.clear, ops.clear, [(2,)], [(2,)]),
    (ops.add, ops.add_adjoint, [(2,), (2,)], [(2,), (2,)]),
    (ops.copy, ops.copy_adjoint, [(2,), (2,)], [(2,), (2,)]),
    (ops.move, ops.move_adjoint, [(2,), (2,)], [(2,), (2,)]),
]


@pytest.mark.parametrize(
    "operator, adjoint, inputs, outputs", ADJOINTS,
    ids=["allocate", "deallocate", "clear", "add", "copy", "move"],
)  # fmt: skip
def test_dot_product_with_the_named_adjoint(
    operator: Callable[..., Any], adjoint: Callable[..., Any], inputs: Shapes, outputs: Shapes
) -> None:
    def pieces(result: Any) -> Sequence[torch.Tensor]:
        return result if isinstance(result, tuple) else (result,)

    x = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in inputs]
    y = [torch.randn(shape, dtype=torch.float64) for shape in outputs]
    there, back = pieces(operator(*x)), pieces(adjoint(*y))
    assert torch.allclose(dot(there, y), dot(x, back), rtol=1e-12)
    # Backward is the named adjoint.
    for gradient, expected in zip(torch.autograd.grad(there, x, y), back, strict=True):
        assert torch.equal(gradient, expected)
    assert torch.autograd.gradcheck(operator, x)
    assert torch.autograd.gradgradcheck(lambda *x: [z**3 for z in pieces(operator(*x))], x)


def test_compositions_of_the_paper() -> None:
    """A move is a copy, then a clear of the source; the adjoint of a copy an add, then a clear."""
    a, b = torch.tensor([2.0]), torch.tensor([5.0])
    first, second = ops.copy(a, b)
    assert [t.item() for t in (ops.clear(first), second)] == [t.item() for t in ops.move(a, b)]
    first, second = ops.add_adjoint(a, b)
    assert [first.item(), ops.clear(second).item()] == [t.item() for t in ops.copy_adjoint(a, b)]
