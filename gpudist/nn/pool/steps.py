"""Reductions of a distributed tensor along one dim: first local cells, then received parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.parts import PartsWindow
from gpudist.geometry.windows import HaloWidths, Window
from gpudist.nn.pool.local import coordinates, gather_cells
from gpudist.nn.pool.ranges import RangeMaximum, RangeSum
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import own_index
from gpudist.world.partition import CartesianPartition


@dataclass(frozen=True)
class ReducedAxis:
    """Reduction of a tensor along one dim.

    Attributes:
        dim: dim of the tensor that is reduced.
        inputs: decomposition of the tensor before this reduction.
        window: window from the parts of the reduction to its outputs.
        P_x: partition of the tensor.
        dtype: dtype of the tensor.
    """

    dim: int
    inputs: Decomposition
    window: PartsWindow
    P_x: CartesianPartition
    dtype: torch.dtype

    @property
    def index(self) -> tuple[int, ...]:
        """Index of this worker on the grid."""
        return own_index(self.P_x)

    @property
    def block_shape(self) -> tuple[int, ...]:
        return self.inputs.block(self.index).shape

    def movement(self, x: torch.Tensor, dtype: torch.dtype) -> Movement:
        """Bind the movement of the parts to the owners of the outputs."""
        windows: list[Window] = [HaloWidths() for _ in self.index]
        windows[self.dim] = self.window
        parts = _with_dim(self.inputs, self.dim, self.window.parts)
        return HaloExchange(self.P_x, windows).bind_to(parts, dtype, x)

    def outputs(self) -> Decomposition:
        """Decomposition of the tensor after this reduction."""
        return _with_dim(self.inputs, self.dim, self.window.outputs(self.window.parts))


@dataclass(frozen=True)
class SumStep:
    """Sums along one dim: first of local cells, then of received partial sums, if any."""

    of_cells: RangeSum
    movement: Movement | None
    of_parts: RangeSum | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self.of_cells(x)
        if self.movement is None or self.of_parts is None:
            return x
        return self.of_parts(move((self.movement,), (x,))[0])


@dataclass(frozen=True)
class MaximumStep:
    """Maxima along one dim, with their flat indices in the dims reduced so far.

    Attributes:
        movements: movements of the maxima and of their indices; ``None`` if nothing moves.
        shape: shape of the block before this reduction.
        dim: dim that is reduced.
        origin: global index of the first local cell along that dim.
        stride: stride of that dim in the flat indices of the global tensor.
    """

    of_cells: RangeMaximum
    movements: tuple[Movement, Movement] | None
    of_parts: RangeMaximum | None
    shape: tuple[int, ...]
    dim: int
    origin: int
    stride: int

    def __call__(
        self, x: torch.Tensor, places: torch.Tensor | None, with_places: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, cells = self.of_cells(x)
        if with_places:
            places_along = coordinates(cells, self.shape[2:])[self.dim - 2] + self.origin
            before = 0 if places is None else gather_cells(places, cells)
            places = places_along * self.stride + before
        if self.movements is None or self.of_parts is None:
            return y, places
        if places is None:
            return self.of_parts(move(self.movements[:1], (y,))[0])[0], None
        y, places = move(self.movements, (y, places))
        y, parts = self.of_parts(y)
        return y, gather_cells(places, parts)


def sum_step(axis: ReducedAxis, x: torch.Tensor) -> SumStep:
    """Bind means along an axis to the layer's input block ``x``."""
    window, dim, worker = axis.window, axis.dim, axis.index[axis.dim]
    cells, lengths = window.own_cells(worker), window.own_lengths(worker)
    of_cells = RangeSum(axis.block_shape, dim, cells, lengths, x.device, axis.dtype)
    if not window.moves:
        return SumStep(of_cells, None, None)
    movement = axis.movement(x, axis.dtype)
    parts = window.own_parts(worker)
    ones = [1] * len(parts)
    of_parts = RangeSum(movement.output_shape, dim, parts, ones, x.device, axis.dtype)
    return SumStep(of_cells, movement, of_parts)


def maximum_step(axis: ReducedAxis, x: torch.Tensor, stride: int) -> MaximumStep:
    """Bind maxima along an axis, ``stride`` apart in flat indices, to the input block ``x``."""
    window, dim, worker, shape = axis.window, axis.dim, axis.index[axis.dim], axis.block_shape
    origin = window.inputs.block(worker)[0]
    of_cells = RangeMaximum(shape, dim, window.own_cells(worker), x.device)
    if not window.moves:
        return MaximumStep(of_cells, None, None, shape, dim, origin, stride)
    movements = axis.movement(x, axis.dtype), axis.movement(x, torch.int64)
    received = movements[0].output_shape
    of_parts = RangeMaximum(received, dim, window.own_parts(worker), x.device)
    return MaximumStep(of_cells, movements, of_parts, shape, dim, origin, stride)


def _with_dim(cut: Decomposition, dim: int, blocks: Blocks) -> Decomposition:
    return Decomposition((*cut.dims[:dim], blocks, *cut.dims[dim + 1 :]))
