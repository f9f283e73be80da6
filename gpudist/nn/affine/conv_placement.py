"""Which workers of a distributed convolution hold what, and which of them convolve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from gpudist.errors import PartitionError
from gpudist.nn.partitions import plane, regrid, require_cells, require_shape
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class ConvPlacement:
    """The grids on which blocks and parameters of a convolution are paired.

    Attributes:
        P_x, P_y: own the input and the output.
        P_c: the workers that convolve.
        P_spread: ``P_x`` on the grid from which its blocks are broadcast to ``P_c``, ``None`` where
            the workers that convolve own the input.
        P_sum: ``P_y`` on the grid to which the outputs of ``P_c`` are summed, ``None`` where the
            workers that convolve own the output.
        P_weight, P_bias: own the blocks of the weight and of the bias. The first axes cut channels;
            along the last one, if parameters are replicated, owners hold the same block.
        P_bias_used: the workers of ``P_c`` that add the bias, so that it is added once.
        P_all: everybody who takes part.
        replicates: whoever uses a block of the parameters owns it.
    """

    P_x: CartesianPartition
    P_y: CartesianPartition
    P_c: CartesianPartition
    P_spread: CartesianPartition | None
    P_sum: CartesianPartition | None
    P_weight: CartesianPartition
    P_bias: CartesianPartition
    P_bias_used: CartesianPartition
    P_all: Partition
    replicates: bool = False

    @property
    def weight_grid(self) -> tuple[int, int]:
        """Blocks of output and of input channels."""
        return self.P_weight.shape[0], self.P_weight.shape[1]

    def groups_of_block(self, groups: int) -> int:
        """Of the groups of the layer, those whose channels are in one block of the weight."""
        return groups // self.weight_grid[0] if groups > 1 else 1

    def replicated(self) -> ConvPlacement:
        """The same with every block of the parameters on all workers that use it."""
        grid = self.P_weight.shape
        return replace(
            self,
            P_weight=regrid(self.P_c, (*grid, self.P_c.size // prod(grid))),
            P_bias=regrid(self.P_bias_used, (*self.P_bias.shape, self.P_c.size // prod(grid))),
            replicates=True,
        )

    @property
    def diagonal(self) -> bool:
        """Blocks of output channels read one block of input channels each."""
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
    """The placement that the arguments given to a layer imply.

    Raises:
        PartitionError: the partitions do not fit each other, or split channels without saying where
            the weight is.
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
        P_spread=regrid(P_x, (ci, 1, *spatial) if diagonal else P_x.shape),
        P_sum=regrid(P_y, (co, 1, *spatial)),
        P_weight=plane(P_w, (0, 1)),
        P_bias=plane(P_w, (0,)),
        P_bias_used=plane(P_w, [axis for axis in range(P_w.dim) if axis != 1]),
        P_all=P_x.create_partition_union(P_w).create_partition_union(P_y),
    )
    return placed.replicated() if replicate_parameters else placed
