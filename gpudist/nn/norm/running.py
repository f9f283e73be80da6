"""Normalization by channel that may track running moments of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn.norm.base import Norm
from gpudist.nn.norm.normalization import Normalization, Running
from gpudist.nn.norm.strides import gradient_as_laid_out
from gpudist.nn.parameters.parameter import empty_output
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.partitions import require_axes
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


class RunningNorm(Norm):
    """Layer with parameters and, if tracked, running moments for each channel.

    Every worker of ``P_x`` holds the running moments of its block of channels, bitwise equal; other
    workers hold zero-volume tensors.
    """

    _reads_low = False
    # Numbers of axes that the layer accepts; without them, any number from 2.
    _possible_dims: tuple[int, ...] = ()

    def __init__(
        self,
        P_x: CartesianPartition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:
        needed = " or ".join(map(str, self._possible_dims))
        require_axes(
            type(self).__name__,
            P_x,
            P_x.dim in self._possible_dims if needed else P_x.dim >= 2,
            f"{needed} axes: batch, channels and features"
            if needed
            else "an axis for the batch and one for the channels",
        )
        super().__init__(
            P_x, (num_features,), (1,), affine, affine and bias, device, dtype, global_shape, shape,
            replicate_parameters,
        )  # fmt: skip
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self.running_mean: torch.Tensor | None
        self.running_var: torch.Tensor | None
        self.num_batches_tracked: torch.Tensor | None
        buffers: list[torch.Tensor | None] = [None, None, None]
        if track_running_stats:
            channels = self._used.own_shape
            buffers = [
                torch.zeros(channels, device=device, dtype=dtype),
                torch.ones(channels, device=device, dtype=dtype),
                torch.tensor(0, device=device),
            ]
        names = ("running_mean", "running_var", "num_batches_tracked")
        for name, buffer in zip(names, buffers, strict=True):
            self.register_buffer(name, buffer)

    def _placements(self) -> dict[str, ParameterPlacement]:
        placed = dict(super()._placements())
        if self.track_running_stats:
            placed |= {"running_mean": self._used, "running_var": self._used}
            placed["num_batches_tracked"] = ParameterPlacement.on(self.P_x.world, ())
        return placed

    def reset_running_stats(self) -> None:
        """Reset the running moments to mean 0 and variance 1."""
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    def _check(self, layout: BlockLayout) -> None:
        channels = layout.decomposition.dims[1]
        if channels.extent != self.num_features:
            raise ShapeError(
                f"{self._name}, dim 1: the input of global shape "
                f"{list(layout.decomposition.shape)} has {channels.extent} channels, not "
                f"{self.num_features}"
            )
        if self.track_running_stats and channels != self._used.blocks[0]:
            raise ShapeError(
                f"{self._name}, dim 1: the input's blocks have {list(channels.lengths)} "
                "channels, but running statistics are kept for balanced blocks; repartition the "
                "input or pass track_running_stats=False"
            )

    def _require_values(self, values: int, what: str) -> None:
        if values == 1:
            raise ShapeError(
                f"{type(self).__name__}: expected more than 1 {what} in the global tensor to "
                "compute statistics of the input"
            )

    def _by_running_moments(self, x: torch.Tensor, bound: Normalization) -> torch.Tensor:
        weight, bias = self._weight_and_bias(bound.move(None, self.own_parameters())[1])
        if x.numel() == 0:
            return empty_output(x.shape, x.dtype, x, weight, bias)
        running = self.running_mean, self.running_var
        return gradient_as_laid_out(F.batch_norm(x, *running, weight, bias, False, 0.0, self.eps))

    def _running(self, batches: torch.Tensor | None = None) -> Running:
        assert self.running_mean is not None and self.running_var is not None
        return Running(self.running_mean, self.running_var, self.momentum or 0.0, batches)
