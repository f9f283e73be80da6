"""Distributed group normalization, over groups of channels that blocks may cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.nn.norm.base import Norm
from gpudist.nn.norm.normalization import Normalization, bind_total
from gpudist.ops.agreement import Layout, ShapeMode
from gpudist.world.partition import CartesianPartition


class DistributedGroupNorm(Norm):
    """Group normalization of ``[B, C, *features]`` cut over ``P_x`` in any dims.

    Args:
        P_x: owns the input and the output, one axis per dim; axis 1 splits the channels.
        num_groups, num_channels, eps, affine, device, dtype, bias: as torch's layer; the numbers
            are global.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        replicate_parameters: every worker that uses a block of the parameters holds it. None moves
            in forward; in backward the gradients are summed over who holds the same cells, those of
            several layers together with :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        One group of messages: where features are split, an all-reduce over their axes of two
        float64 per sample and group of the block's channels; where blocks cut groups, per sample
        and group, over the axis of the channels too; a broadcast of the parameters' blocks along
        all axes but that of the channels. Uneven blocks of channels: one message more to cut the
        parameters alike. Backward the same.

    Raises:
        PartitionError: at construction, if ``P_x`` has fewer than two axes.
        ShapeError: on every rank alike, if the channels do not fit, or there is one value per
            group.

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
        name = type(self).__name__
        if P_x.dim < 2:
            raise PartitionError(
                f"{name}: P_x has shape {list(P_x.shape)} but needs an axis for the batch and one "
                "for the channels"
            )
        if num_groups < 1 or num_channels < 1 or num_channels % num_groups:
            raise ShapeError(
                f"{name}, dim 1: {num_channels} channels cannot be cut into {num_groups} groups of "
                "one size"
            )
        super().__init__(
            P_x, (num_channels,), (1,), affine, affine and bias, device, dtype, global_shape, shape,
            replicate_parameters,
        )  # fmt: skip
        self.num_groups, self.num_channels = num_groups, num_channels
        self.eps, self.affine = eps, affine

    def _check(self, layout: Layout) -> None:
        name, shape = type(self).__name__, layout.decomposition.shape
        if shape[1] != self.num_channels:
            raise ShapeError(
                f"{name}, dim 1: the input of global shape {list(shape)} has {shape[1]} channels, "
                f"not {self.num_channels}"
            )
        if prod(shape) == self.num_groups:
            raise ShapeError(
                f"{name}: expected more than 1 value per group in the global tensor of shape "
                f"{list(shape)}"
            )

    def _bind_layout(
        self, layout: Layout, parameters: tuple[Movement | None, ...]
    ) -> Normalization:
        P_x, shape = self.P_x, layout.decomposition.shape
        assert P_x.rank is not None and P_x.index is not None
        channels = layout.decomposition.dims[1]
        start, stop = channels.block(P_x.index[1])
        size = self.num_channels // self.num_groups
        features = tuple(range(2, P_x.dim))
        cuts_groups = any(channels.block(i)[0] % size for i in range(channels.parts))
        first, count = (
            (0, self.num_groups) if cuts_groups else (start // size, (stop - start) // size)
        )
        axes = (1, *features) if cuts_groups else features
        samples = layout.shape_of(P_x.rank)[0]
        return Normalization(
            features,
            size * prod(shape[2:]),
            self.eps,
            groups=torch.arange(start, stop, device=P_x.device) // size - first,
            group_count=count,
            total=bind_total(P_x, axes, layout, (samples, count, 2)),
            parameters=parameters,
        )

    def _normalize_alone(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        bound: Normalization,
    ) -> torch.Tensor:
        # Unlike the function of torch.nn, it does not count the values of this block.
        on = torch.backends.cudnn.enabled
        return torch.group_norm(x, bound.group_count, weight, bias, self.eps, on)
