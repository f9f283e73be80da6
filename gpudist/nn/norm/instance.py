"""Distributed instance normalization over any partition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpudist.exchange.autograd import move
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.norm.node import normalize, normalize_block
from gpudist.nn.norm.normalization import Normalization, bind_total
from gpudist.nn.norm.running import RunningNorm
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedInstanceNorm(RunningNorm):
    """Instance normalization of ``[B, C, *features]`` split over ``P_x`` along any dims.

    Every worker holds the running statistics of its channels, if tracked, bitwise equal.

    Args:
        P_x: partition of the input and the output, one axis per dim; axis 1 splits the channels.
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in torch's
            layer; the number of channels is global.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it. No
            parameter moves in forward; in backward, gradients are summed over the workers that hold
            the same cells, and those of several layers together with
            :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        One group of messages: where features are split, an all-reduce over their axes of two
        float64 per sample and channel and, with ``affine=True``, a broadcast of the parameters'
        blocks along all axes except the channel axis. Backward costs the same. Tracked statistics
        of a split batch require one more all-reduce of two float64 per channel, in forward only.

    Raises:
        PartitionError: at construction, if the number of axes of ``P_x`` does not fit the layer.
        ShapeError: on every rank alike, if the number of channels does not fit, running statistics
            are tracked but the blocks of channels are not balanced, or there is only one value per
            channel.

    Source:
        Ulyanov, Vedaldi & Lempitsky 2016, arXiv:1607.08022.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:
        super().__init__(
            P_x, num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias,
            global_shape=global_shape, shape=shape, replicate_parameters=replicate_parameters,
        )  # fmt: skip

    def _normalization(self, layout: BlockLayout) -> Normalization:
        assert self.P_x.rank is not None
        channels = layout.shape_of(self.P_x.rank)[1]
        batch = bind_total(self.P_x, (0,), layout.key, (channels, 2))
        samples = layout.decomposition.shape[0]
        return Normalization(tuple(range(2, self.P_x.dim)), self.eps, samples=samples, batch=batch)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return input.clone()
        bound: Normalization = self._bindings(input, self._agree_and_bind, self.way_of(input))
        if not self.training and self.running_mean is not None:
            return self._by_running_moments(input, bound)
        self._require_values(bound.cells, "spatial element")
        if not self.track_running_stats:
            return normalize_block(bound, input, self.own_parameters())
        y, totals, shift = normalize(bound, input, self.own_parameters())
        if bound.samples > 0 and bound.cells > 0:
            mean, variance = bound.moments(totals, shift)
            assert mean is not None
            unbiased = variance * (bound.cells / (bound.cells - 1))
            self._remember_mean(mean, unbiased, bound)
        return y

    def _remember_mean(
        self, mean: torch.Tensor, variance: torch.Tensor, bound: Normalization
    ) -> None:
        sums = torch.stack([mean, variance], -1).sum(0).reshape(-1, 2)
        if bound.batch is not None:
            sums = move((bound.batch,), (sums,))[0]
        mean, variance = (sums / bound.samples).unbind(-1)
        self._running().update(mean, variance)


@layer(F.instance_norm, Sample((2, 4, 9)), num_features=4, affine=True)
class DistributedInstanceNorm1d(_DistributedInstanceNorm):
    _possible_dims = (3,)


@layer(F.instance_norm, Sample((2, 4, 9, 8)), num_features=4, affine=True)
class DistributedInstanceNorm2d(_DistributedInstanceNorm):
    _possible_dims = (4,)


@layer(F.instance_norm, Sample((2, 4, 5, 6, 3)), num_features=4, affine=True)
class DistributedInstanceNorm3d(_DistributedInstanceNorm):
    _possible_dims = (5,)
