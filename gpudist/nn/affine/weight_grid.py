"""Grid of workers that holds a matrix in blocks, paired with blocks of inputs and outputs."""

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
from gpudist.ops.broadcast import plan_between
from gpudist.ops.operator import placeholder_shape
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class WeightGrid:
    """Grids of the workers that use a matrix; their axes are leading axes, rows and columns.

    Attributes:
        P_c: computing workers; those that differ only along leading axes use the same block.
        P_source: owners of the input, on the grid that broadcasts its blocks to ``P_c``.
        P_sum: owners of the output, on the grid that sums the products of ``P_c``.
        P_weight: owners of the matrix: the workers of ``P_c`` at index 0 of all leading axes.
        P_all: union of all participating workers.
    """

    P_c: CartesianPartition
    P_source: CartesianPartition
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
        """Return the grids implied by the partitions of a layer.

        Args:
            name: name of the layer.
            P_x, P_y, P_w: partitions of the input, the output and the matrix; ``P_w`` may have just
                rows and columns if all leading axes are 1.
            leading: extents of the leading axes, shared by input, output and ``P_w``.
            weight_parts: number of blocks of rows and of columns; ``None`` for any number.
            x_parts, y_parts: number of blocks of the input and of the output along these two axes.

        Raises:
            PartitionError: the partitions do not match.
        """
        dims = max(len(leading), P_y.dim - 1)
        if left_padded(P_y.shape[:-1], dims, 1) != left_padded(leading, dims, 1):
            require_shape(name, "P_y", P_y, (*leading, None))
        short = P_w.dim == 2 and prod(leading) == 1
        require_shape(name, "P_w", P_w, weight_parts if short else (*leading, *weight_parts))
        P_c = regrid(P_w, (*leading, *P_w.shape[-2:]))
        return cls(
            P_c,
            P_source=regrid(P_x, (*leading, *x_parts)),
            P_sum=regrid(P_y, (*leading, *y_parts)),
            P_weight=plane(P_c, (P_c.dim - 2, P_c.dim - 1)),
            P_all=P_x.create_partition_union(P_w).create_partition_union(P_y),
        )

    @property
    def parts(self) -> tuple[int, int]:
        """Number of blocks of rows and of columns."""
        return self.P_c.shape[-2], self.P_c.shape[-1]

    def bind_broadcast(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        """Bind the broadcast of the input blocks to the computing workers."""
        P_x, P_c = self.P_source, self.P_c
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
        """Bind the sum-reduce of the products into the output blocks.

        Args:
            leading, features: blocks of the output along its leading dims and its last one.
            dtype: dtype of the output.
            placeholder, placeholder_dtype: shape and dtype of the tensor that a worker passes if it
                does not compute.
            x: block of the input, or its placeholder.
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
