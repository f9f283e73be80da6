"""A matrix in blocks on a grid of workers, and how inputs and outputs are paired with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.broadcasting import Pairing
from gpudist.geometry.cartesian import left_padded
from gpudist.nn.partitions import plane, regrid, require_shape
from gpudist.ops.agreement import Layout
from gpudist.ops.broadcast import plan_between
from gpudist.ops.operator import placeholder_shape
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class WeightGrid:
    """The workers that use the blocks of a matrix; grids have leading axes, rows and columns.

    Attributes:
        P_c: the workers that compute. Along the leading axes they use the same blocks.
        P_spread: the owners of the input, on the grid from which its blocks are broadcast to
            ``P_c``.
        P_sum: the owners of the output, on the grid to which the products of ``P_c`` are summed.
        P_weight: own the blocks of the matrix: the workers of ``P_c`` at index 0 of all leading
            axes.
        P_all: everybody who takes part.
    """

    P_c: CartesianPartition
    P_spread: CartesianPartition
    P_sum: CartesianPartition
    P_weight: CartesianPartition
    P_all: Partition

    @classmethod
    def place(
        cls,
        name: str,
        P_x: CartesianPartition,
        P_y: CartesianPartition,
        P_w: CartesianPartition,
        leading: Sequence[int],
        weight_parts: tuple[int | None, int | None],
        x_parts: tuple[int, int],
        y_parts: tuple[int, int],
    ) -> WeightGrid:
        """The pairing that the partitions given to a layer imply.

        Args:
            name: of the layer.
            P_x, P_y, P_w: own the input and the output, and use the matrix; ``P_w`` may have rows
                and columns alone where all leading axes are 1.
            leading: axes that input, output and ``P_w`` share.
            weight_parts: blocks of rows and of columns; ``None`` for any number.
            x_parts, y_parts: of these, those over which the input, and the output, are split.

        Raises:
            PartitionError: the partitions do not fit each other.
        """
        dims = max(len(leading), P_y.dim - 1)
        if left_padded(P_y.shape[:-1], dims, 1) != left_padded(leading, dims, 1):
            require_shape(name, "P_y", P_y, (*leading, None))
        short = P_w.dim == 2 and prod(leading) == 1
        require_shape(name, "P_w", P_w, weight_parts if short else (*leading, *weight_parts))
        P_c = regrid(P_w, (*leading, *P_w.shape[-2:]))
        return cls(
            P_c,
            P_spread=regrid(P_x, (*leading, *x_parts)),
            P_sum=regrid(P_y, (*leading, *y_parts)),
            P_weight=plane(P_c, (P_c.dim - 2, P_c.dim - 1)),
            P_all=P_x.create_partition_union(P_w).create_partition_union(P_y),
        )

    @property
    def parts(self) -> tuple[int, int]:
        """Blocks of rows and of columns."""
        return self.P_c.shape[-2], self.P_c.shape[-1]

    def bind_spread(self, layout: Layout, x: torch.Tensor) -> Movement:
        """The broadcast of the input's blocks to the workers that compute."""
        P_x, P_c = self.P_spread, self.P_c
        P_both = P_x.create_partition_union(P_c)
        pairing = Pairing(P_x.shape, P_c.shape)
        plan = plan_between(P_x, P_c, P_both, pairing, layout.shape_of, layout.key)
        label = f"broadcast {list(P_x.shape)} -> {list(P_c.shape)}"
        empty = placeholder_shape(x)
        return bind(plan, P_both, label, layout.dtype, x.shape, x.dtype, empty)

    def bind_sum(
        self,
        leading: tuple[Blocks, ...],
        features: Blocks,
        dtype: torch.dtype,
        placeholder: tuple[int, ...],
        placeholder_dtype: torch.dtype,
        x: torch.Tensor,
    ) -> Movement:
        """The sum-reduce of the products into the output's blocks.

        Args:
            leading, features: the cut of the output.
            dtype: of the output.
            placeholder, placeholder_dtype: of what a worker that does not compute passes.
            x: the input.
        """
        P_y, P_c = self.P_sum, self.P_c
        P_both = P_y.create_partition_union(P_c)

        def shape_of(rank: int) -> tuple[int, ...]:
            *index, row, column = P_y.cartesian_index(rank)
            at = left_padded(index, len(leading), 0)
            lengths = [blocks.length(i) for blocks, i in zip(leading, at, strict=True)]
            # The output is split along one of the two axes; the index on the other is 0.
            return (*lengths, features.length(row + column))

        pairing = Pairing(P_y.shape, P_c.shape)
        plan = plan_between(P_y, P_c, P_both, pairing, shape_of, (leading, features)).T
        label = f"sum_reduce {list(P_c.shape)} -> {list(P_y.shape)}"
        empty = placeholder_shape(x)
        return bind(plan, P_both, label, dtype, placeholder, placeholder_dtype, empty)
