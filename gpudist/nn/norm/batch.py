"""Distributed batch normalization over any partition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.norm.node import is_alone, normalize
from gpudist.nn.norm.normalization import Normalization
from gpudist.nn.norm.running import RunningNorm
from gpudist.nn.norm.strides import gradient_as_laid_out
from gpudist.ops.shape_agreement import BlockLayout


@layer(F.batch_norm, Sample((2, 4, 9, 8)), num_features=4, sequential=torch.nn.BatchNorm2d)
class DistributedBatchNorm(RunningNorm):
    """Batch normalization of ``[B, C, *features]`` split over ``P_x`` along any dims.

    Every worker holds the running statistics of its channels, bitwise equal.

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
        One group of messages: an all-reduce of two float64 per channel over all axes except the
        channel axis, and a broadcast of the parameters' blocks along the same axes. Backward costs
        the same, with the gradients sum-reduced. Evaluation with running statistics needs no
        all-reduce: only the parameters move, and nothing if ``affine=False`` or if only channels
        are split.

    Raises:
        PartitionError: at construction, if the number of axes of ``P_x`` does not fit the layer.
        ShapeError: on every rank alike, if the number of channels does not fit, running statistics
            are tracked but the blocks of channels are not balanced, or there is only one value per
            channel.

    Source:
        Ioffe & Szegedy 2015, arXiv:1502.03167.
    """

    def _normalization(self, layout: BlockLayout) -> Normalization:
        return Normalization(tuple(d for d in range(self.P_x.dim) if d != 1), self.eps)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        learns = self.training and self.track_running_stats
        if learns and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if not self.P_x.active:
            return input.clone()
        bound: Normalization = self._bindings(input, self._agree_and_bind, self.way_of(input))
        if not self.training and self.running_mean is not None:
            return self._by_running_moments(input, bound)
        self._require_values(bound.cells, "value per channel")
        parameters = self.own_parameters()
        if not is_alone(bound, input, parameters) or (learns and self.momentum is None):
            batches = self.num_batches_tracked if self.momentum is None else None
            running = self._running(batches) if learns else None
            return normalize(bound, input, parameters, running).y
        weight, bias = self._weight_and_bias(bound.move(None, parameters)[1])
        running = (self.running_mean, self.running_var) if learns else (None, None)
        return gradient_as_laid_out(
            F.batch_norm(input, *running, weight, bias, True, self.momentum or 0.0, self.eps)
        )


@layer(F.batch_norm, Sample((2, 4, 9)), num_features=4)
class DistributedBatchNorm1d(DistributedBatchNorm):
    _possible_dims = (2, 3)


@layer(F.batch_norm, Sample((2, 4, 9, 8)), num_features=4)
class DistributedBatchNorm2d(DistributedBatchNorm):
    _possible_dims = (4,)


@layer(F.batch_norm, Sample((2, 4, 5, 6, 3)), num_features=4)
class DistributedBatchNorm3d(DistributedBatchNorm):
    _possible_dims = (5,)
