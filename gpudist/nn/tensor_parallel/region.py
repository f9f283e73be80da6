"""Communication of tensor-parallel layers at the entry and exit of their split part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.exchange.tracing import constant_when_traced
from gpudist.geometry.layout import split
from gpudist.nn.norm.line_blocks import LineBlocks
from gpudist.nn.parameters.gradient_graph import Convention
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.tensor_parallel.conventions import Expectation, mark_result
from gpudist.nn.tensor_parallel.invariant import copy_once, sum_once
from gpudist.nn.tensor_parallel.invariant_blocks import cut_unchecked, gather_once
from gpudist.ops.bind_cache import BindCache
from gpudist.ops.shape_agreement import ShapeMode, refuse
from gpudist.world.partition import CartesianPartition, Partition

Lengths = int | Sequence[int]


class TensorRegion:
    """Workers of a tensor-parallel layer, and the operators at its entry and exit.

    Args:
        name: name of the layer.
        P: partition of its workers.
        axis: axis of ``P`` along which the layer is split; the other axes hold copies of the layer,
            which work on other samples.
        convention: gradient convention of values that are the same on all workers along the axis:
            their gradients add up (``"dual"``), or are the same on all of them (``"invariant"``).
        shape: agreement on lengths of blocks that are not given: once (``"static"``) or at every
            call (``"dynamic"``).

    Attributes:
        P: the same workers on a grid ``[copies, size]``.
        line: workers along the axis, including this one.
        size: number of workers in the line.
        rank: rank of this worker in the line; 0 outside.

    Raises:
        PartitionError, ShapeError: an argument is not valid.
    """

    def __init__(
        self,
        name: str,
        P: Partition,
        axis: int = -1,
        convention: Convention = "invariant",
        shape: ShapeMode = "static",
    ) -> None:
        if convention not in ("dual", "invariant"):
            raise ShapeError(f"{name}: convention is {convention!r}; use 'dual' or 'invariant'")
        if shape not in ("static", "dynamic"):
            raise ShapeError(f"{name}: shape is {shape!r}; it must be 'static' or 'dynamic'")
        self._name, self.convention = name, convention
        self.P = _axis_last(name, P, axis)
        along = self.P.along([1])
        self.line = along.create_cartesian_topology_partition([along.size])
        self.size, self.rank = self.line.size, self.line.rank or 0
        self._blocks = LineBlocks(self.line, name) if self.line.active else None
        self._copies = Expectation(name, convention, 2)
        self._parts = Expectation(name, "dual", 2)
        self._dynamic = shape == "dynamic"
        self._agreed: tuple[int, ...] | None = None
        self._learnt = BindCache[tuple[int, ...]](shape)

    @property
    def is_invariant(self) -> bool:
        return self.convention == "invariant"

    def placement(
        self, sizes: Sequence[int] | None, shape: Sequence[int], dim: int, parts: int | None = None
    ) -> ParameterPlacement:
        """Return the placement of a parameter: a copy on every worker, or blocks along ``dim``.

        Args:
            sizes: sizes of the blocks; ``None`` for a copy on every worker.
            shape: global shape of the parameter.
            dim: dim that is split.
            parts: number of blocks, by default the number of workers, which it must divide. Each
                block is held by the same number of consecutive workers.
        """
        parts = parts or self.size
        copies = self.P.shape[0]
        grid = self.P.create_cartesian_topology_partition([copies, parts, self.size // parts])
        splits = {1: split(dim, sizes)} if sizes is not None else None
        return ParameterPlacement.on(grid, shape, splits)

    def lengths(self, x: torch.Tensor, dim: int, given: Lengths | None) -> tuple[int, ...]:
        """Return the lengths of all workers' blocks like ``x`` along ``dim``.

        Cost:
            No message if the lengths are given, or known from an earlier call; otherwise one
            message.

        Raises:
            ShapeError: the block does not fit the given lengths.
            PlanMismatch: the block's length changed since the lengths were agreed on.
        """
        if self.size == 1:
            return (x.shape[dim],)
        if given is not None:
            return self._line_blocks.require_lengths(x, dim, given, False)
        if self._dynamic and is_dynamo_compiling():
            _refuse_to_trace(self._name)
        return self._learnt(x, self._learn, dim)

    def _learn(self, x: torch.Tensor, dim: int) -> tuple[int, ...]:
        length = x.shape[dim]
        if self._agreed is None or self._dynamic:
            self._agreed = tuple([row[0] for row in self.line.allgather_data([length])])
        elif length != self._agreed[self.rank]:
            refuse(
                self.line,
                PlanMismatch(
                    f"{self._name}: the block of rank {self.rank} of {self.line!r} had "
                    f"{self._agreed[self.rank]} cells in dim {dim} and now has {length}, which the "
                    "other ranks cannot know; pass lengths=, or shape='dynamic' to agree at every "
                    "call"
                ),
            )
        return self._agreed

    @property
    def _line_blocks(self) -> LineBlocks:
        assert self._blocks is not None
        return self._blocks

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Copy a value that is equal on all workers, before they compute different parts."""
        self._copies(x, self.line)
        if self.size > 1 and self.is_invariant:
            return self.mark(copy_once(x, self.line))
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the workers' tensors, on each of them."""
        if self.size == 1:
            return x
        self.take_parts(x)
        if self.is_invariant:
            return self.mark(sum_once(x, self.line))
        return self._move(self._line_blocks.total(x), x)

    def gather(self, x: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """Gather the workers' blocks, before they compute different parts."""
        if self.size == 1:
            return x
        self.take_parts(x)
        return self._move(self._line_blocks.gather(x, dim, lengths), x)

    def sum_scatter(self, x: torch.Tensor, dim: int, given: Lengths | None) -> torch.Tensor:
        """Return this worker's block of the sum of the workers' tensors.

        Blocks are balanced unless their lengths are given.
        """
        if self.size == 1:
            return x
        blocks = self._line_blocks
        lengths = blocks.require_lengths(x, dim, given, True)
        self.take_parts(x)
        return self._move(blocks.sum_scatter(x, dim, lengths), x)

    def whole(self, x: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """Gather the workers' blocks into a value that is equal on all of them."""
        if self.size == 1 or not self.is_invariant:
            return self.gather(x, dim, lengths)
        own_range = sum(lengths[: self.rank]), lengths[self.rank]
        self.take_parts(x)
        return self.mark(gather_once(x, self._line_blocks.gather(x, dim, lengths), dim, own_range))

    def _move(self, movement: Movement, x: torch.Tensor) -> torch.Tensor:
        return self.mark(move((movement,), (x,))[0])

    def take_parts(self, x: torch.Tensor) -> None:
        """Raise if a value has the full gradient on each worker, where parts are expected."""
        self._parts(x, self.line)

    def mark(self, y: torch.Tensor) -> torch.Tensor:
        """Return ``y``, the new result of an operator, with the layer's name on its node."""
        return mark_result(y, self._name, self.line)

    def own_block(self, x: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """Return this worker's block of a value that is equal on all workers."""
        if self.size == 1:
            return x
        lengths = self._line_blocks.require_lengths(x, dim, lengths, True)
        self._copies(x, self.line)
        if self.is_invariant:
            return self.mark(cut_unchecked(x, self._line_blocks, dim, lengths))
        return x.narrow(dim, sum(lengths[: self.rank]), lengths[self.rank])


@checked()
def sequence_lengths(x: torch.Tensor, P: Partition, dim: int) -> tuple[int, ...]:
    """Return the lengths of all workers' blocks along ``dim``, to be passed to layers.

    Collective over ``P``; one small message. If its result is passed to all layers of a network,
    they need only one message per step, whatever the lengths.

    Args:
        x: this worker's block.
        P: partition of the workers, in the order of their blocks.
        dim: dim along which the tensor is split.

    Returns:
        Length of each worker's block, in the order of ``P``.
    """
    return tuple([row[0] for row in P.allgather_data([x.shape[dim]])])


@constant_when_traced
def _refuse_to_trace(name: str) -> None:
    # If torch.compile traced this ``raise``, it would only break the graph.
    raise ShapeError(f"{name}: under torch.compile pass lengths, or shape='static'")


def _axis_last(name: str, P: Partition, axis: int) -> CartesianPartition:
    """Return the workers of ``P`` on a grid of two axes: all others merged, and ``axis``."""
    if not -P.dim <= axis < P.dim:
        raise PartitionError(f"{name}: axis is {axis}; it must be one of the {P.dim} axes of {P!r}")
    axis %= P.dim
    size = P.shape[axis]
    if axis == P.dim - 1:
        return P.create_cartesian_topology_partition([P.size // size, size])
    ranks = np.moveaxis(np.arange(P.size).reshape(P.shape), axis, -1).flatten()
    members = P.create_partition_inclusive(ranks.tolist())
    return members.create_cartesian_topology_partition([P.size // size, size])
