"""Convolutions split over channels only, with DistDL's arguments."""

from __future__ import annotations

from gpudist import nn
from gpudist.compat.distdl.nn.conv_general import GeneralConv


class DistributedChannelConv1d(GeneralConv, nn.DistributedConv1d):
    __doc__ = GeneralConv.__doc__


class DistributedChannelConv2d(GeneralConv, nn.DistributedConv2d):
    __doc__ = GeneralConv.__doc__


class DistributedChannelConv3d(GeneralConv, nn.DistributedConv3d):
    __doc__ = GeneralConv.__doc__
