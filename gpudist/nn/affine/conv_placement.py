"""Placement of a distributed convolution: owners of tensors, and convolving workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from gpudist.errors import PartitionError
from gpudist.nn.partitions import plane, regrid, require_cells, require_shape
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class ConvPlacement:
    """Grids that pair the blocks and parameters of a convolution.

    Attributes:
        P_x, P_y: partitions of the input and the output.
        P_c: workers that convolve.
        P_source: ``P_x`` on the grid that broadcasts its blocks to ``P_c``; ``None`` if the
            convolving workers own the input.
        P_sum: ``P_y`` on the grid that sums the outputs of ``P_c``; ``None`` if the convolving
            workers own the output.
        P_weight, P_bias: owners of the blocks of the weight and of the bias. The first axes split
            channels; if parameters are replicated, workers along the last axis hold the same block.
        P_bias_used: workers of ``P_c`` that add the bias, so that it is added only once.
        P_all: union of all participating workers.
        replicates: whether every user of a parameter block holds a copy of it.
    """

    P_x: CartesianPartition
    P_y: CartesianPartition
    P_c: CartesianPartition
    P_source: CartesianPartition | None
    P_sum: CartesianPartition | None
    P_weight: CartesianPartition
    P_bias: CartesianPartition
    P_bias_used: CartesianPartition
    P_all: Partition
    replicates: bool = False

    @property
    def weight_grid(self) -> tuple[int, int]:
        """Number of blocks of output channels and of input channels."""
        return self.P_weight.shape[0], self.P_weight.shape[1]

    def groups_of_block(self, groups: int) -> int:
        """Return the number of groups in one block of the weight."""
        return groups // self.weight_grid[0] if groups > 1 else 1

    def replicated(self) -> ConvPlacement:
        """Return this placement with each parameter block replicated on all its users."""
        grid = self.P_weight.shape
        return replace(
            self,
            P_weight=regrid(self.P_c, (*grid, self.P_c.size // prod(grid))),
            P_bias=regrid(self.P_bias_used, (*self.P_bias.shape, self.P_c.size // prod(grid))),
            replicates=True,
        )

    @property
    def diagonal(self) -> bool:
        """Whether each block of output channels reads a single block of input channels."""
        return self.P_x.shape[1] > 1 and self.weight_grid[1] == 1


def place(
    name: str,
    P_x: CartesianPartition,
    P_y: CartesianPartition | None,
    P_w: CartesianPartition | None,
    in_channels: int,
    out_channels: int,
    groups: int,
    dims: int,
    replicate_parameters: bool = False,
) -> ConvPlacement:
    """Return the placement implied by the arguments of a layer.

    Raises:
        PartitionError: the partitions do not match, or split channels without ``P_y`` and ``P_w``.
        ShapeError: there are more blocks than channels.
    """
    if P_x.dim != dims + 2:
        raise PartitionError(
            f"{name}: P_x has shape {list(P_x.shape)} but needs {dims + 2} axes: batch, channels "
            f"and {dims} of features"
        )
    spatial, ci = P_x.shape[2:], P_x.shape[1]
    if P_y is None and P_w is None and ci > 1:
        if groups == 1 or P_x.shape[0] > 1:
            raise PartitionError(
                f"{name}, dim 1: P_x of shape {list(P_x.shape)} splits the channels; give P_y and "
                f"P_w of shapes {[1, 'co', *spatial]} and {['co', ci, *spatial]} too"
            )
        P_y, P_w = P_x, regrid(P_x, [ci, 1, *spatial])
    if P_w is None or P_y is None:
        root = plane(P_x, ())
        placed = ConvPlacement(P_x, P_x, P_x, None, None, root, root, P_x, P_x)
        return placed.replicated() if replicate_parameters else placed
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
    placed = ConvPlacement(
        P_x,
        P_y,
        P_c=P_w,
        P_source=regrid(P_x, (ci, 1, *spatial) if diagonal else P_x.shape),
        P_sum=regrid(P_y, (co, 1, *spatial)),
        P_weight=plane(P_w, (0, 1)),
        P_bias=plane(P_w, (0,)),
        P_bias_used=plane(P_w, [axis for axis in range(P_w.dim) if axis != 1]),
        P_all=P_x.create_partition_union(P_w).create_partition_union(P_y),
    )
    return placed.replicated() if replicate_parameters else placed
