"""Layers and operators with DistDL's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist import nn, ops
from gpudist.compat.distdl.adapter import MPIBufferManager, adapt
from gpudist.compat.distdl.partition import MPICartesianPartition, MPIPartition
from gpudist.errors import ShapeError

# Torch's name of the linear mode, by the number of dims.
_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


def average_pool(
    self: Any,
    P_x: MPICartesianPartition,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    buffer_manager: MPIBufferManager | None = None,
) -> None:
    """Average pool of a tensor split over ``P_x``; the input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        kernel_size, padding: see torch's layer.
        stride: cells between two outputs; unlike torch's layer, 1 by default.
        buffer_manager: ignored.
    """


def max_pool(
    self: Any,
    P_x: MPICartesianPartition,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    buffer_manager: MPIBufferManager | None = None,
) -> None:
    """Maximum pool of a tensor split over ``P_x``; the input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        kernel_size, padding, dilation: see torch's layer.
        stride: cells between two outputs; unlike torch's layer, 1 by default.
        buffer_manager: ignored.
    """


def batch_norm(
    self: Any,
    P_x: MPICartesianPartition,
    num_features: int,
    eps: float = 1e-5,
    momentum: float | None = 0.1,
    affine: bool = True,
    track_running_stats: bool = True,
) -> None:
    """Batch normalization of a tensor split over ``P_x`` along any dims.

    See :class:`gpudist.nn.DistributedBatchNorm`. The input's blocks may change at every call.

    Args:
        P_x: partition of input and output; axis 1 splits the channels.
        num_features, eps, momentum, affine, track_running_stats: see torch's layer; the number of
            channels is global.
    """


def linear(
    self: Any,
    P_x: MPICartesianPartition,
    P_y: MPICartesianPartition,
    P_w: MPICartesianPartition,
    in_features: int,
    out_features: int,
    bias: bool = True,
) -> None:
    """Linear layer whose input and output features are split.

    See :class:`gpudist.nn.DistributedLinear`. The input's blocks may change at every call.

    Args:
        P_x, P_y, P_w: partitions of input, output and weight, of shapes ``[1, fi]``, ``[1, fo]``
            and ``[fo, fi]``.
        in_features, out_features, bias: see torch's layer; sizes are global.
    """


def between_partitions(
    self: Any,
    P_x: MPIPartition,
    P_y: MPIPartition,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
) -> None:
    """Copy or sum blocks of ``P_x`` to the matching workers of ``P_y``.

    See :func:`gpudist.broadcast` and :func:`gpudist.sum_reduce`. Blocks may change at every call.

    Args:
        P_x, P_y, transpose_src, transpose_dest, preserve_batch: see :func:`gpudist.broadcast`.
    """


def over_axes(
    self: Any,
    P_x: MPICartesianPartition,
    axes_reduce: Sequence[int] | None = None,
    axes_keep: Sequence[int] | None = None,
) -> None:
    """Sum blocks over axes of ``P_x``, for every worker; see :func:`gpudist.all_sum_reduce`.

    Blocks may change at every call.

    Args:
        P_x, axes_reduce, axes_keep: see :func:`gpudist.all_sum_reduce`.
    """


class _Affine:
    """Parameters of a normalization, in DistDL's names."""

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    @property
    def gamma(self) -> torch.nn.Parameter | None:
        """The weight."""
        return self.weight

    @property
    def beta(self) -> torch.nn.Parameter | None:
        """The bias."""
        return self.bias


class _Sublinear:
    @property
    def sublinear(self) -> Any:
        """This layer: DistDL keeps ``weight`` and ``bias`` in a layer within."""
        return self


class DistributedUpsample(nn.DistributedUpsample):
    """Interpolation of a tensor split over ``P_x``; see :class:`gpudist.nn.DistributedUpsample`.

    The input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        buffer_manager: ignored.
        size: global shape of the output, with batch and channels.
        scale_factor: factor of the spatial dims.
        mode: ``"linear"``, in any number of dims, or ``"nearest"``.
        align_corners: see torch's layer; ignored by ``"nearest"``.

    Raises:
        ShapeError: the mode is another one, or not one of ``size`` and ``scale_factor`` is given.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        buffer_manager: MPIBufferManager | None = None,
        size: Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "linear",
        align_corners: bool = False,
    ) -> None:
        torchs_mode = torchs_mode_of(type(self).__name__, mode, P_x.dim)
        if size is not None and len(size) != P_x.dim:
            raise ShapeError(
                f"{type(self).__name__}: size has {len(size)} entries but P_x has {P_x.dim} axes; "
                "give the shape of the whole output, with batch and channels"
            )
        super().__init__(
            P_x.partition, None if size is None else list(size[2:]), scale_factor, torchs_mode,
            None if mode == "nearest" else align_corners, shape="dynamic",
        )  # fmt: skip


def torchs_mode_of(name: str, mode: str, dims: int) -> str:
    """Return torch's name for DistDL's ``mode`` of a tensor with ``dims`` dims.

    Raises:
        ShapeError: DistDL does not have this mode.
    """
    if mode not in ("linear", "nearest"):
        raise ShapeError(
            f"{name}: mode is {mode!r}; it must be 'linear' or 'nearest'; "
            "gpudist.nn.DistributedUpsample has all modes of torch"
        )
    return _LINEAR.get(dims, mode) if mode == "linear" else mode


_ROWS: list[tuple[Any, ...]] = [
    (average_pool, nn.DistributedAvgPool1d),
    (average_pool, nn.DistributedAvgPool2d),
    (average_pool, nn.DistributedAvgPool3d),
    (max_pool, nn.DistributedMaxPool1d),
    (max_pool, nn.DistributedMaxPool2d),
    (max_pool, nn.DistributedMaxPool3d),
    (batch_norm, _Affine, nn.DistributedBatchNorm),
    (linear, _Sublinear, nn.DistributedLinear),
    (between_partitions, ops.Broadcast),
    (between_partitions, ops.SumReduce),
    (over_axes, ops.AllSumReduce),
]
LAYERS: dict[str, Any] = {
    bases[-1].__name__: adapt(bases[-1].__name__, arguments, *bases) for arguments, *bases in _ROWS
}
"""Classes by DistDL's names."""
