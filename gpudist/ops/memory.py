"""Operators of the paper on memory: allocate, deallocate, clear, add, copy, move; and adjoints.

Each is a matrix of zeros and ones that acts on pieces of memory ``(a, b)``; its adjoint is the
transpose. In the paper, the operators act in place. Here, they take and return values, so that
autograd can record them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.arguments import checked
from gpudist.exchange.autograd import apply

Matrix = tuple[tuple[int, ...], ...]
Shapes = tuple[tuple[int, ...], ...]

_ALLOCATE: Matrix = ((1,), (0,))
_CLEAR: Matrix = ((0,),)
_ADD: Matrix = ((1, 0), (1, 1))
_COPY: Matrix = ((1, 0), (1, 0))
_MOVE: Matrix = ((0, 0), (1, 0))


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(matrix: Matrix, shapes: Shapes, *pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _product(matrix, pieces, shapes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.matrix, ctx.shapes, *pieces = inputs
        ctx.pieces = tuple([tuple(piece.shape) for piece in pieces])
        ctx.save_for_backward(pieces[0].new_empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        # torch.compile differentiates only once, and cannot trace a function inside a backward.
        adjoint = _product if is_dynamo_compiling() else _apply
        return (None, None, *adjoint(_transposed(ctx.matrix), gradients, ctx.pieces))


class _ApplyToDuals(_Apply):
    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _apply(ctx.matrix, tangents[2:], ctx.shapes)


def _apply(
    matrix: Matrix, pieces: Sequence[torch.Tensor], shapes: Shapes
) -> tuple[torch.Tensor, ...]:
    if is_dynamo_compiling():
        # torch.compile cannot trace a function that has a jvp, or takes a tensor twice.
        return _Apply.apply(matrix, shapes, *[x.view_as(x) for x in pieces])  # pyright: ignore
    return apply(_ApplyToDuals, matrix, shapes, *pieces)


def _product(
    matrix: Matrix, pieces: Sequence[torch.Tensor], shapes: Shapes
) -> tuple[torch.Tensor, ...]:
    outputs: list[torch.Tensor] = []
    for row, shape in zip(matrix, shapes, strict=True):
        terms = [piece for factor, piece in zip(row, pieces, strict=True) if factor]
        outputs.append(
            pieces[0].new_zeros(shape) if not terms
            else terms[0].clone() if len(terms) == 1
            else terms[0] + terms[1]
        )  # fmt: skip
    return tuple(outputs)


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


def _pair(matrix: Matrix, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = _apply(matrix, (a, b), (tuple(a.shape), tuple(b.shape)))
    return first, second


@checked()
def allocate(
    a: torch.Tensor, shape: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map ``a -> (a, 0)``, with new memory of ``shape``, by default that of ``a``.

    Adjoint: :func:`deallocate`. Source: arXiv:2006.03108, section 2.
    """
    block_shape = tuple(a.shape)
    first, second = _apply(
        _ALLOCATE, (a,), (block_shape, block_shape if shape is None else tuple(shape))
    )
    return first, second


@checked()
def deallocate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Map ``(a, b) -> a``. Adjoint: :func:`allocate`. Source: arXiv:2006.03108, section 2."""
    return _apply(_transposed(_ALLOCATE), (a, b), (tuple(a.shape),))[0]


@checked()
def clear(a: torch.Tensor) -> torch.Tensor:
    """Map ``a -> 0``; self-adjoint. Source: arXiv:2006.03108, section 2."""
    return _apply(_CLEAR, (a,), (tuple(a.shape),))[0]


@checked()
def add(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map ``(a, b) -> (a, a + b)``. Adjoint: :func:`add_adjoint`. Source: arXiv:2006.03108."""
    return _pair(_ADD, a, b)


@checked()
def add_adjoint(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map ``(a, b) -> (a + b, b)``, an add in the other direction. Adjoint: :func:`add`."""
    return _pair(_transposed(_ADD), a, b)


@checked()
def copy(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map ``(a, b) -> (a, a)``. Adjoint: :func:`copy_adjoint`. Source: arXiv:2006.03108."""
    return _pair(_COPY, a, b)


@checked()
def copy_adjoint(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map ``(a, b) -> (a + b, 0)``, an add followed by a clear. Adjoint: :func:`copy`."""
    return _pair(_transposed(_COPY), a, b)


@checked()
def move(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map ``(a, b) -> (0, a)``. Adjoint: :func:`move_adjoint`. Source: arXiv:2006.03108."""
    return _pair(_MOVE, a, b)


@checked()
def move_adjoint(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map ``(a, b) -> (b, 0)``, a move in the other direction. Adjoint: :func:`move`."""
    return _pair(_transposed(_MOVE), a, b)
