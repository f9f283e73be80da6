"""Distributed causal convolution over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
import torch.nn.functional as F

from gpudist.nn.affine.conv import DistributedConv1d
from gpudist.nn.affine.conv_arguments import CAUSAL_PADDING_MODES, Paddings
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import partitions_lead
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


class SequentialCausalConv1d(torch.nn.Conv1d):
    """Sequential causal convolution, which torch does not have: padding in front only."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        cells = self.dilation[0] * (self.kernel_size[0] - 1)
        return super().forward(F.pad(input, (cells, 0)))


@layer(
    torch.conv1d,
    Sample((2, 4, 9)),
    in_channels=4,
    out_channels=6,
    kernel_size=3,
    sequential=SequentialCausalConv1d,
)
class DistributedCausalConv1d(DistributedConv1d):
    """Causal convolution over time of ``[B, C, T]``: outputs depend on current and past inputs.

    Equivalent to :class:`DistributedConv1d` with ``dilation * (kernel_size - 1)`` cells of padding
    in front and none behind. It has the same parameters but takes no ``padding``. Output ``t``
    belongs to time ``t * stride``.

    Args:
        P_x, P_y, P_w: see :class:`DistributedConv1d`.
        in_channels ... bias: see :class:`DistributedConv1d`.
        padding_mode: ``"zeros"`` or ``"replicate"``; the other modes would read later inputs.
        device, dtype: see :class:`DistributedConv1d`.
        global_shape, shape, nested, replicate_parameters: see :class:`DistributedConv1d`.

    Cost:
        The same as :class:`DistributedConv1d`; one-sided padding requires a copy of the block.

    Raises:
        PartitionError, ShapeError: see :class:`DistributedConv1d`.
    """

    _padding_modes = CAUSAL_PADDING_MODES

    @overload
    def __init__(
        self, P_x: CartesianPartition, in_channels: int, out_channels: int,
        kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, P_y: CartesianPartition | None = None,
        P_w: CartesianPartition | None = None, global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static", nested: bool | None = False,
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, P_x: CartesianPartition, P_y: CartesianPartition, P_w: CartesianPartition,
        in_channels: int, out_channels: int, kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1, dilation: int | Sequence[int] = 1, groups: int = 1,
        bias: bool = True, padding_mode: str = "zeros", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static", nested: bool | None = False,
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @partitions_lead
    def __init__(
        self, P_x: CartesianPartition, in_channels: int, out_channels: int,
        kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, P_y: CartesianPartition | None = None,
        P_w: CartesianPartition | None = None, global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static", nested: bool | None = False,
        replicate_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            P_x, in_channels, out_channels, kernel_size, stride, 0, dilation, groups, bias,
            padding_mode, device, dtype, P_y=P_y, P_w=P_w, global_shape=global_shape, shape=shape,
            nested=nested, replicate_parameters=replicate_parameters,
        )  # fmt: skip

    def _paddings_of(self, padding: int | Sequence[int] | str) -> Paddings:
        sizes = zip(self.kernel_size, self.dilation, strict=True)
        return tuple((d * (k - 1), 0) for k, d in sizes)
