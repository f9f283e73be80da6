"""Operators of the paper on memory: clear, add, copy, move, and their adjoints.

Each is a matrix of zeros and ones that acts on two pieces of memory ``(a, b)``; its adjoint is the
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

_CLEAR: Matrix = ((0,),)
_ADD: Matrix = ((1, 0), (1, 1))
_COPY: Matrix = ((1, 0), (1, 0))
_MOVE: Matrix = ((0, 0), (1, 0))


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(matrix: Matrix, *pieces: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _product(matrix, pieces)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.matrix = inputs[0]
        ctx.save_for_backward(inputs[1].new_empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        # torch.compile differentiates only once, and cannot trace a function inside a backward.
        adjoint = _product if is_dynamo_compiling() else _apply
        return (None, *adjoint(_transposed(ctx.matrix), gradients))


class _ApplyToDuals(_Apply):
    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _apply(ctx.matrix, tangents[1:])


def _apply(matrix: Matrix, pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if is_dynamo_compiling():
        # torch.compile cannot trace a function that has a jvp, or takes a tensor twice.
        return _Apply.apply(matrix, *[x.view_as(x) for x in pieces])  # pyright: ignore
    return apply(_ApplyToDuals, matrix, *pieces)


def _product(matrix: Matrix, pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    outputs: list[torch.Tensor] = []
    for row in matrix:
        terms = [piece for factor, piece in zip(row, pieces, strict=True) if factor]
        outputs.append(
            torch.zeros_like(pieces[0]) if not terms
            else terms[0].clone() if len(terms) == 1
            else terms[0] + terms[1]
        )  # fmt: skip
    return tuple(outputs)


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


def _pair(matrix: Matrix, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = _apply(matrix, (a, b))
    return first, second


@checked()
def clear(a: torch.Tensor) -> torch.Tensor:
    """Map ``a -> 0``; self-adjoint. Source: arXiv:2006.03108, section 2."""
    return _apply(_CLEAR, (a,))[0]


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
