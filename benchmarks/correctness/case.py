"""A module with the shape of its input, and the layouts that split the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Shape = tuple[int, ...]
Precision = Literal["float64", "bfloat16", "autocast"]


@dataclass(frozen=True)
class Layout:
    """Split of the input among processes.

    Attributes:
        name: name in the tables.
        dims: dims of the input that are split, one for each axis of the process grid.
        grid: numbers of processes along them.
        is_uneven: whether the first split dim gets an odd extent.
    """

    name: str
    dims: tuple[int, ...]
    grid: tuple[int, ...]
    is_uneven: bool = False

    @property
    def ranks(self) -> int:
        return torch.Size(self.grid).numel()

    def dims_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the split dims as indices from 0."""
        return tuple(dim % len(shape) for dim in self.dims)

    def axes_of(self, shape: Sequence[int]) -> list[int]:
        """Return the number of processes along every dim of the input."""
        parts = dict(zip(self.dims_of(shape), self.grid, strict=True))
        return [parts.get(dim, 1) for dim in range(len(shape))]


LAYOUTS = (
    Layout("rows", (2,), (2,)),
    Layout("columns", (-1,), (2,)),
    Layout("both", (2, -1), (2, 2)),
    Layout("uneven", (2,), (2,), is_uneven=True),
)


@dataclass(frozen=True)
class Case:
    """A module and the shape of its input.

    Attributes:
        name: name in the tables.
        make: returns the module for an input of a shape.
        shape: shape of the input, ``[B, C, *features]``.
        order: 1 to compare gradients, 2 to compare gradients of the squared input gradient.
        precision: ``"float64"``, ``"bfloat16"`` for parameters and input, or ``"autocast"`` for
            bfloat16 operations on float32.
    """

    name: str
    make: Callable[[Shape], nn.Module]
    shape: Shape
    order: int = 1
    precision: Precision = "float64"

    def layouts(self) -> list[Layout]:
        """Layouts that differ for this shape."""
        names = {"rows", "uneven"} if len(self.shape) == 3 else {each.name for each in LAYOUTS}
        if self.shape[2] % 2:
            names -= {"uneven"}  # rows are uneven already
        return [each for each in LAYOUTS if each.name in names]

    def shape_in(self, layout: Layout) -> Shape:
        shape = list(self.shape)
        if layout.is_uneven:
            shape[2] += 1
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {"float64": torch.float64, "bfloat16": torch.bfloat16, "autocast": torch.float32}
        return dtypes[self.precision]

    @property
    def tolerance(self) -> float:
        """Largest error that counts as right, relative to the largest value and to 1."""
        return 1e-9 if self.precision == "float64" else 0.05

    def module(self, layout: Layout) -> nn.Module:
        """Return the sequential module, with the same weights in every process."""
        torch.manual_seed(1)
        return self.make(self.shape_in(layout)).to(self.dtype)

    def input(self, layout: Layout) -> torch.Tensor:
        return _random(self.shape_in(layout), seed=2).to(self.dtype)

    def context(self) -> AbstractContextManager[Any]:
        """Return the context of the forward."""
        if self.precision == "autocast":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()


def cotangent(shape: Sequence[int]) -> torch.Tensor:
    """Return the weights of an output in the loss ``(output * weights).sum()``."""
    return _random(shape, seed=3)


def _random(shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def backward(case: Case, loss: torch.Tensor, x: torch.Tensor, whole: Callable[..., Any]) -> None:
    """Backward of the case's order; ``whole`` maps the input gradient to what its square sums."""
    if case.order == 2:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = whole(gradient).square().sum()
    loss.backward()
