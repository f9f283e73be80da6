"""Workers of an affine layer: owners of input and output, and computing workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from gpudist.errors import PartitionError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.broadcasting import Pairing
from gpudist.geometry.cartesian import pad_left
from gpudist.geometry.layout import split
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.partitions import plane, require_cells, require_features, require_shape
from gpudist.ops.broadcast import plan_between
from gpudist.ops.operator import placeholder_shape
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class AffinePlacement:
    """Grids that pair the blocks and parameters of an affine layer.

    Attributes:
        P_x, P_y: partitions of the input and the output.
        P_c: computing workers; those that differ on neither axis of the weight share its block.
        P_bias: workers of ``P_c`` that add the bias, so that it is added only once.
        P_all: union of all participating workers.
        P_source: ``P_x`` on the grid that broadcasts its blocks to ``P_c``; ``None`` if the
            computing workers own the input.
        P_sum: ``P_y`` on the grid that sums the outputs of ``P_c``; ``None`` if the computing
            workers own the output.
        weight_axes: axes of ``P_c`` that split the weight: for convolutions, by output and by input
            channels; for matrices, by rows and by columns. ``None`` if it is whole.
    """

    P_x: CartesianPartition
    P_y: CartesianPartition
    P_c: CartesianPartition
    P_bias: CartesianPartition
    P_all: Partition
    P_source: CartesianPartition | None = None
    P_sum: CartesianPartition | None = None
    weight_axes: tuple[int, int] | None = None

    @classmethod
    def whole(cls, P_x: CartesianPartition) -> AffinePlacement:
        """Return the placement of a layer that uses its whole weight on each block of the input."""
        return cls(P_x, P_x, P_x, P_x, P_x)

    @property
    def parts(self) -> tuple[int, int]:
        """Number of blocks of the weight along both of its axes."""
        if self.weight_axes is None:
            return 1, 1
        row, column = self.weight_axes
        return self.P_c.shape[row], self.P_c.shape[column]

    def parameters(
        self, weight_shape: Sequence[int], bias: int | None = None, dims: tuple[int, int] = (0, 1)
    ) -> dict[str, ParameterPlacement]:
        """Return the placement of the parameters on the workers that use them.

        Args:
            weight_shape: global shape of the weight.
            bias: global number of cells of the bias; ``None`` without one.
            dims: dims of the weight that its two axes split.
        """
        axes = self.weight_axes or ()
        splits = {axis: split(dim) for axis, dim in zip(axes, dims, strict=False)}
        used = {"weight": ParameterPlacement.on(self.P_c, weight_shape, splits)}
        if bias is not None:
            rows = {axis: split(0) for axis in axes[:1]}
            used["bias"] = ParameterPlacement.on(self.P_bias, (bias,), rows)
        return used

    def bind_broadcast(
        self,
        shape_of: Callable[[int], tuple[int, ...]],
        key: object,
        dtype: torch.dtype,
        placeholder: tuple[torch.Size | tuple[int, ...], torch.dtype],
        x: torch.Tensor,
    ) -> Movement:
        """Bind the broadcast of the blocks of ``P_x`` to the computing workers.

        Args:
            shape_of: function from a rank of ``P_x`` to the shape of its block.
            key: hashable values that determine these shapes.
            dtype: dtype of the blocks.
            placeholder: shape and dtype of the tensor that a worker without a block passes.
            x: block of the input, or its placeholder.
        """
        P_x, P_c = self.P_source, self.P_c
        assert P_x is not None
        P_both = P_x.create_partition_union(P_c)
        plan = plan_between(P_x, P_c, P_both, Pairing(P_x.shape, P_c.shape), shape_of, key)
        label = f"broadcast {list(P_x.shape)} -> {list(P_c.shape)}"
        return bind(plan, P_both, label, dtype, *placeholder, placeholder_shape(x))

    def bind_sum(
        self,
        shape_of: Callable[[Sequence[int]], tuple[int, ...]],
        key: object,
        dtype: torch.dtype,
        placeholder: tuple[torch.Size | tuple[int, ...], torch.dtype],
        x: torch.Tensor,
    ) -> Movement | None:
        """Bind the sum-reduce of the outputs of the computing workers, into ``P_y`` if it is split.

        Args:
            shape_of: function from an index on ``P_sum`` to the shape of that block of the output.
            key: hashable values that determine these shapes.
            dtype: dtype of the outputs.
            placeholder: shape and dtype of the tensor that a worker passes if it does not compute.
            x: block of the input, or its placeholder.
        """
        P_y, P_c = self.P_sum, self.P_c
        if P_y is None:
            return None
        P_both = P_y.create_partition_union(P_c)
        plan = plan_between(
            P_y, P_c, P_both, Pairing(P_y.shape, P_c.shape),
            lambda rank: shape_of(P_y.cartesian_index(rank)), key,
        ).T  # fmt: skip
        label = f"sum_reduce {list(P_c.shape)} -> {list(P_y.shape)}"
        return bind(plan, P_both, label, dtype, *placeholder, placeholder_shape(x))

    def bind_matrix_sum(
        self,
        leading: Sequence[Blocks],
        features: Blocks,
        dtype: torch.dtype,
        placeholder: tuple[torch.Size | tuple[int, ...], torch.dtype],
        x: torch.Tensor,
    ) -> Movement | None:
        """Bind the sum of outputs with these blocks along leading dims and along features."""

        def shape_of(at: Sequence[int]) -> tuple[int, ...]:
            *index, row, column = at
            index = pad_left(index, len(leading), 0)
            lengths = [blocks.length(i) for blocks, i in zip(leading, index, strict=True)]
            # The output is split along one of the two axes; the index on the other is 0.
            return (*lengths, features.length(row + column))

        return self.bind_sum(shape_of, (tuple(leading), features), dtype, placeholder, x)


def place_matrix(
    name: str,
    P_x: CartesianPartition,
    P_y: CartesianPartition,
    P_w: CartesianPartition,
    leading: Sequence[int],
    weight_parts: tuple[int | None, int | None],
    x_parts: tuple[int, int],
    y_parts: tuple[int, int],
) -> AffinePlacement:
    """Return the placement of a layer with a matrix: leading axes, rows and columns.

    Args:
        name: name of the layer.
        P_x, P_y, P_w: partitions of the input, the output and the matrix; ``P_w`` may have just
            rows and columns if all leading axes are 1.
        leading: extents of the leading axes, shared by input, output and ``P_w``.
        weight_parts: number of blocks along both axes of the matrix; ``None`` for any number.
        x_parts, y_parts: number of blocks of the input and of the output along these two axes.

    Raises:
        PartitionError: the partitions do not match.
    """
    dims = max(len(leading), P_y.dim - 1)
    if pad_left(P_y.shape[:-1], dims, 1) != pad_left(leading, dims, 1):
        require_shape(name, "P_y", P_y, (*leading, None))
    short = P_w.dim == 2 and prod(leading) == 1
    require_shape(name, "P_w", P_w, weight_parts if short else (*leading, *weight_parts))
    P_c = P_w.create_cartesian_topology_partition((*leading, *P_w.shape[-2:]))
    return AffinePlacement(
        P_x,
        P_y,
        P_c,
        P_bias=plane(P_c, range(P_c.dim - 1)),
        P_all=P_x.create_partition_union(P_w).create_partition_union(P_y),
        P_source=P_x.create_cartesian_topology_partition((*leading, *x_parts)),
        P_sum=P_y.create_cartesian_topology_partition((*leading, *y_parts)),
        weight_axes=(P_c.dim - 2, P_c.dim - 1),
    )


def place_channels(
    name: str,
    P_x: CartesianPartition,
    P_y: CartesianPartition | None,
    P_w: CartesianPartition | None,
    in_channels: int,
    out_channels: int,
    groups: int,
    dims: int,
) -> AffinePlacement:
    """Return the placement of a convolution.

    Raises:
        PartitionError: the partitions do not match, or split channels without ``P_y`` and ``P_w``.
        ShapeError: there are more blocks than channels.
    """
    require_features(name, P_x, dims)
    spatial, ci = P_x.shape[2:], P_x.shape[1]
    if P_y is None and P_w is None and ci > 1:
        if groups == 1 or P_x.shape[0] > 1:
            raise PartitionError(
                f"{name}, dim 1: P_x of shape {list(P_x.shape)} splits the channels; give P_y and "
                f"P_w of shapes {[1, 'co', *spatial]} and {['co', ci, *spatial]} too"
            )
        P_y, P_w = P_x, P_x.create_cartesian_topology_partition([ci, 1, *spatial])
    if P_w is None or P_y is None:
        return AffinePlacement.whole(P_x)
    co = P_y.shape[1] if P_y.dim == dims + 2 else 0
    diagonal = groups > 1 and (ci > 1 or co > 1)
    require_shape(name, "P_x", P_x, (1, None, *spatial))
    require_shape(name, "P_y", P_y, (1, None, *spatial))
    if diagonal and (ci != co or groups % ci or P_w.shape != (co, 1, *spatial)):
        raise PartitionError(
            f"{name}, dim 1: groups {groups} with split channels need a block-diagonal partition: "
            "as many blocks of input as of output channels, a divisor of groups, and P_w of shape "
            f"{[co, 1, *spatial]}; got {ci} and {co} blocks and P_w {list(P_w.shape)}"
        )
    if not diagonal:
        require_shape(name, "P_w", P_w, (co, ci, *spatial))
    require_cells(name, 1, ci, in_channels, "input channels")
    require_cells(name, 1, co, out_channels, "output channels")
    return AffinePlacement(
        P_x,
        P_y,
        P_c=P_w,
        P_bias=plane(P_w, [axis for axis in range(P_w.dim) if axis != 1]),
        P_all=P_x.create_partition_union(P_w).create_partition_union(P_y),
        P_source=P_x.create_cartesian_topology_partition(
            (ci, 1, *spatial) if diagonal else P_x.shape
        ),
        P_sum=P_y.create_cartesian_topology_partition((co, 1, *spatial)),
        weight_axes=(0, 1),
    )
