"""Distributed convolution over time that looks back only."""

from __future__ import annotations

from gpudist.nn.affine.conv import DistributedConv1d
from gpudist.nn.affine.conv_arguments import CAUSAL_PADDING_MODES, CausalArguments


class DistributedCausalConv1d(DistributedConv1d):
    """Convolution over time of ``[B, C, T]`` whose output ``t`` depends on inputs up to ``t`` only.

    As :class:`DistributedConv1d` of an input that has ``dilation * (kernel_size - 1)`` cells of
    padding in front and none behind; hence it has the same parameters, and no ``padding``. Output
    ``t`` is that of time ``t * stride``.

    Args:
        P_x, P_y, P_w: as :class:`DistributedConv1d`.
        in_channels, out_channels, kernel_size, stride, dilation, groups, bias: in this order.
        padding_mode: ``"zeros"`` or ``"replicate"``: others would read later inputs.
        device, dtype: behind it.
        global_shape, shape, overlap, nested, replicate_parameters: as :class:`DistributedConv1d`.

    Cost:
        That of :class:`DistributedConv1d`, never in place: padding on one side alone is copied.

    Raises:
        PartitionError, ShapeError: as :class:`DistributedConv1d`.
    """

    _arguments = CausalArguments
    _padding_modes = CAUSAL_PADDING_MODES
