"""Distributed group normalization, with groups that may span blocks of channels."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.norm.base import Norm
from gpudist.nn.norm.normalization import Normalization
from gpudist.nn.partitions import require_axes
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


@layer(F.group_norm, Sample((2, 4, 9, 8)), num_groups=2, num_channels=4)
class DistributedGroupNorm(Norm):
    """Group normalization of ``[B, C, *features]`` split over ``P_x`` along any dims.

    Args:
        P_x: partition of the input and the output, one axis per dim; axis 1 splits the channels.
        num_groups, num_channels, eps, affine, device, dtype, bias: as in torch's layer; the numbers
            are global.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it. No
            parameter moves in forward; in backward, gradients are summed over the workers that hold
            the same cells, and those of several layers together with
            :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        One group of messages. If features are split, an all-reduce over their axes of two float64
        per sample and group of the block's channels. If groups span blocks, the all-reduce also
        covers the channel axis, with two float64 per sample and group. A broadcast of the
        parameters' blocks along all axes except the channel axis. Uneven blocks of channels require
        one more message to repartition the parameters. Backward costs the same.

    Raises:
        PartitionError: at construction, if ``P_x`` has fewer than two axes.
        ShapeError: on every rank alike, if the number of channels does not fit, or there is only
            one value per group.

    Source:
        Wu & He 2018, arXiv:1803.08494.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:
        require_axes(
            self._name, P_x, P_x.dim >= 2, "an axis for the batch and one for the channels"
        )
        if num_groups < 1 or num_channels < 1 or num_channels % num_groups:
            raise ShapeError(
                f"{self._name}, dim 1: {num_channels} channels cannot be divided into {num_groups} "
                f"groups of equal size; use a divisor of {num_channels}"
            )
        super().__init__(
            P_x, (num_channels,), (1,), affine, affine and bias, device, dtype, global_shape, shape,
            replicate_parameters,
        )  # fmt: skip
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = eps, affine

    def _check(self, layout: BlockLayout) -> None:
        shape = layout.decomposition.shape
        if shape[1] != self.num_channels:
            raise ShapeError(
                f"{self._name}, dim 1: the input of global shape {list(shape)} has {shape[1]} "
                f"channels, not {self.num_channels}"
            )
        if prod(shape) == self.num_groups:
            raise ShapeError(
                f"{self._name}: expected more than 1 value per group in the global tensor of shape "
                f"{list(shape)}"
            )

    def _normalization(self, layout: BlockLayout) -> Normalization:
        features = tuple(range(2, self.P_x.dim))
        return Normalization(features, self.eps, group_count=self.num_groups)
