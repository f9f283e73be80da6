"""What tensor-parallel layers exchange: how tensors enter and leave the part that is split."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.compiler import is_dynamo_compiling

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.exchange.library import constant_when_traced
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.cartesian import rank_of
from gpudist.nn.affine.linear_overlap import BlockProducts
from gpudist.nn.norm.line_blocks import LineBlocks
from gpudist.nn.parameters.gradient_graph import Convention
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.tensor_parallel.conventions import Expectation, marked
from gpudist.nn.tensor_parallel.invariant import copy_once, sum_once
from gpudist.nn.tensor_parallel.invariant_blocks import cut_once, gather_once
from gpudist.ops.agreement import ShapeMode, refuse
from gpudist.ops.bound import Bound
from gpudist.world.partition import CartesianPartition, Partition

Lengths = int | Sequence[int]


class TensorRegion:
    """The workers of a tensor-parallel layer, and the operators at its entry and its exit.

    Args:
        name: of the layer.
        P: its workers.
        axis: of ``P``, along which the layer is split; the other axes hold copies of it, which work
            on other samples.
        convention: of the gradients of values that are the same on all workers along the axis: they
            add up (``"dual"``), or are the same on all of them (``"invariant"``).
        shape: whether lengths of blocks are agreed on once (``"static"``) or at every call
            (``"dynamic"``), where they are not given.

    Attributes:
        P: the same workers on a grid ``[copies, size]``.
        line: those along the axis, with this one.
        size: how many these are.
        rank: of this worker among them; 0 outside.

    Raises:
        PartitionError, ShapeError: an argument is none of these.
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
        self._learnt = Bound[tuple[int, ...]](shape)

    @property
    def is_invariant(self) -> bool:
        return self.convention == "invariant"

    def placement(
        self, sizes: Sequence[int] | None, shape: Sequence[int], dim: int, parts: int | None = None
    ) -> Placement:
        """Where a parameter of this shape is: whole on every worker, or in blocks along ``dim``.

        Args:
            sizes: of the blocks, if there are any.
            shape: of the whole parameter.
            dim: that is cut.
            parts: blocks, a divisor of the number of workers, of which as many after one another
                hold the same block; as many as workers unless given.
        """
        parts = parts or self.size
        copies = self.P.shape[0]
        grid = self.P.create_cartesian_topology_partition([copies, parts, self.size // parts, 1])
        dims = [Blocks(extent, 1) for extent in shape]
        axes = [3] * len(dims)
        if sizes is not None:
            dims[dim], axes[dim] = Blocks.of_sizes(sizes), 1
        return Placement(grid, Decomposition(tuple(dims)), tuple(axes))

    def lengths(self, x: torch.Tensor, dim: int, given: Lengths | None) -> tuple[int, ...]:
        """The lengths of all workers' blocks like ``x`` along ``dim``.

        Cost:
            None if they are given, or known from an earlier call; else one message.

        Raises:
            ShapeError: the block does not fit those that were given.
            PlanMismatch: the block is not as long as it was when the lengths were agreed on.
        """
        if self.size == 1:
            return (x.shape[dim],)
        if given is not None:
            return self._line_blocks.given(x, dim, given, False)
        if self._dynamic and is_dynamo_compiling():
            _refuse_to_trace(self._name)
        return self._learnt(x, self._learn, dim)

    def lengths_of_whole(self, x: torch.Tensor, dim: int, given: Lengths | None) -> tuple[int, ...]:
        """The lengths of blocks into which to cut ``x``, balanced unless they are given."""
        return self._line_blocks.given(x, dim, given, True)

    def _learn(self, x: torch.Tensor, dim: int) -> tuple[int, ...]:
        own = x.shape[dim]
        if self._agreed is None or self._dynamic:
            self._agreed = tuple([row[0] for row in self.line.allgather_data([own])])
        elif own != self._agreed[self.rank]:
            refuse(
                self.line,
                PlanMismatch(
                    f"{self._name}: the block of rank {self.rank} of {self.line!r} had "
                    f"{self._agreed[self.rank]} cells in dim {dim} and now has {own}, which the "
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
        """A value that is the same on all workers, where they begin to differ."""
        self._copies(x, self.line)
        if self.size > 1 and self.is_invariant:
            return self.marked(copy_once(x, self.line))
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the workers' tensors, on each of them."""
        if self.size == 1:
            return x
        self.take_parts(x)
        if self.is_invariant:
            return self.marked(sum_once(x, self.line))
        return self._moved(self._line_blocks.total(x), x)

    def gather(self, x: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """The workers' blocks put together, for workers that go on to differ."""
        if self.size == 1:
            return x
        self.take_parts(x)
        return self._moved(self._line_blocks.gather(x, dim, lengths), x)

    def products(self, block: torch.Tensor, dim: int, lengths: Sequence[int]) -> BlockProducts:
        """Products of the workers' blocks like ``block``, while others of them are on their way."""
        blocks = self._line_blocks
        pieces, gather = blocks.pieces(block, dim, lengths), blocks.gather(block, dim, lengths)
        return BlockProducts(pieces, gather, self.rank, dim, tuple(lengths))

    def sum_scatter(self, x: torch.Tensor, dim: int, given: Lengths | None) -> torch.Tensor:
        """This worker's block of the sum of the workers' tensors; blocks are balanced unless their
        lengths are given."""
        if self.size == 1:
            return x
        blocks = self._line_blocks
        lengths = blocks.given(x, dim, given, True)
        self.take_parts(x)
        return self._moved(blocks.sum_scatter(x, dim, lengths), x)

    def whole(self, x: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """The workers' blocks put together into a value that is the same on all of them."""
        if self.size == 1 or not self.is_invariant:
            return self.gather(x, dim, lengths)
        own = sum(lengths[: self.rank]), lengths[self.rank]
        self.take_parts(x)
        return self.marked(gather_once(x, self._line_blocks.gather(x, dim, lengths), dim, own))

    def _moved(self, movement: Movement, x: torch.Tensor) -> torch.Tensor:
        return self.marked(move((movement,), (x,))[0])

    def take_parts(self, x: torch.Tensor) -> None:
        """Refuse a value that has the whole gradient on each worker, where parts are wanted."""
        self._parts(x, self.line)

    def marked(self, y: torch.Tensor) -> torch.Tensor:
        """``y``, which the layer's operator has just made, with the layer's name on its node."""
        return marked(y, self._name, self.line)

    def own_block(self, x: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """This worker's block of a value that is the same on all workers."""
        if self.size == 1:
            return x
        lengths = self._line_blocks.given(x, dim, lengths, True)
        self._copies(x, self.line)
        if self.is_invariant:
            return self.marked(cut_once(x, self._line_blocks, dim, lengths))
        return x.narrow(dim, sum(lengths[: self.rank]), lengths[self.rank])


@checked()
def sequence_lengths(x: torch.Tensor, P: Partition, dim: int) -> tuple[int, ...]:
    """The lengths of the blocks of all workers of ``P`` along ``dim``, to be passed to layers.

    Collective over ``P``; one small message. With it, all layers of a network together need one
    message at a step, whatever the lengths.

    Args:
        x: this worker's block.
        P: the workers, in the order of their blocks.
        dim: along which the tensor is cut.
    """
    return tuple([row[0] for row in P.allgather_data([x.shape[dim]])])


@constant_when_traced
def _refuse_to_trace(name: str) -> None:
    """Raise out of torch.compile: a ``raise`` that it traces is a break in the graph to it."""
    raise ShapeError(f"{name}: under torch.compile give lengths, or shape='static'")


def _axis_last(name: str, P: Partition, axis: int) -> CartesianPartition:
    """The workers of ``P`` on a grid with ``axis`` last, and all other axes as one in front."""
    if not -P.dim <= axis < P.dim:
        raise PartitionError(f"{name}: axis {axis} is none of the {P.dim} axes of {P!r}")
    axis %= P.dim
    size = P.shape[axis]
    if axis == P.dim - 1:
        return P.create_cartesian_topology_partition([P.size // size, size])
    after = prod(P.shape[axis + 1 :])
    before = prod(P.shape[:axis])
    ranks = [
        rank_of((i, k, j), (before, size, after))
        for i in range(before)
        for j in range(after)
        for k in range(size)
    ]
    members = P.create_partition_inclusive(ranks)
    return members.create_cartesian_topology_partition([before * after, size])
