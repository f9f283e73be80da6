"""Every layer and function that a conversion knows is that of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpudist import distribute
from gpudist.convert.layers import LAYERS
from gpudist.partition import Partition
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.pool import distributed

# Arguments by name of the class, for an input [2, 4, 8, ...].
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "AdaptiveAvgPool": ((3,), {}),
    "AdaptiveMaxPool": ((3,), {}),
    "AvgPool": ((3, 2, 1), {"ceil_mode": True, "count_include_pad": False}),
    "BatchNorm": ((4,), {"eps": 0.1}),
    "ChannelShuffle": ((2,), {}),
    "CircularPad": ((1,), {}),
    "ConstantPad": ((1, 0.5), {}),
    "Conv": ((4, 6, 3, 2, 2, 2, 2, False, "reflect"), {}),
    "ConvTranspose": ((4, 6, 3, 2, 1, 1, 2, False, 1), {}),
    "GroupNorm": ((2, 4, 0.1), {}),
    "InstanceNorm": ((4,), {"affine": True, "track_running_stats": True}),
    "LPPool": ((2, 2, 1), {}),
    "LayerNorm": ((8, 0.1), {"bias": False}),
    "Linear": ((8, 5), {"bias": False}),
    "LogSoftmax": ((2,), {}),
    "MaxPool": ((3, 2, 1, 2), {}),
    "PixelShuffle": ((2,), {}),
    "PixelUnshuffle": ((2,), {}),
    "RMSNorm": ((8, 0.1), {}),
    "ReflectionPad": ((1,), {}),
    "ReplicationPad": ((1,), {}),
    "Softmax": ((2,), {}),
    "Softmin": ((2,), {}),
    "Softmax2d": ((), {}),
    "Upsample": ((None, 1.5, "bilinear", False), {}),
    "UpsamplingNearest2d": ((5,), {}),
    "UpsamplingBilinear2d": ((5,), {}),
    "ZeroPad": ((1,), {}),
}
RANDOM = ("Dropout", "AlphaDropout", "FeatureAlphaDropout")
NAMES = [kind.__name__ for kind in LAYERS if kind.__name__ != "Embedding"]


def check(P_world: Partition, alone: nn.Module, shape: list[int], whole: torch.Tensor) -> None:
    P_x = grid(P_world, shape)
    for mode in (True, False):
        alone.train(mode)
        net: Any = distribute(alone, P_x)
        assert net.training == mode
        y, expected = net(own_block(whole, P_x)).detach(), alone(whole).detach()
        assert_block_of(y, expected, own_slices(expected.shape, net.P_y), f"training={mode}")


@pytest.mark.parametrize("name", NAMES)
@distributed(ranks=2, transports=["loopback"])
def test_layer(P_world: Partition, name: str) -> None:
    stem, dims = (name[:-2], int(name[-2])) if name[-2:] in ("1d", "2d", "3d") else (name, 2)
    dropped = stem in RANDOM
    args, options = ((0.0,), {}) if dropped else ARGUMENTS[name if name in ARGUMENTS else stem]
    alone = getattr(nn, name)(*args, **options).double()
    for parameter in alone.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    split = 0 if stem == "Linear" else 2
    shape = [2 if dim == split else 1 for dim in range(dims + 2)]
    check(P_world, alone, shape, random_like_all((2, 4, *(8,) * dims), 1))


@distributed(ranks=2, transports=["loopback"])
def test_embedding(P_world: Partition) -> None:
    alone, P_x = nn.Embedding(7, 3, padding_idx=2).double(), grid(P_world, [1, 2])
    net: Any = distribute(alone, P_x)
    indices = torch.arange(10).reshape(2, 5) % 7
    y = net(own_block(indices, P_x, requires_grad=False)).detach()
    assert_block_of(y, alone(indices).detach(), own_slices((2, 5, 3), net.P_y), "output")
    assert net.P_y.shape == (1, 2, 1)


class Calls(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.act = nn.SiLU()
        self.conv2 = nn.Conv2d(4, 4, 1)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.conv(x))


def _gated(x: torch.Tensor) -> torch.Tensor:
    value, gate = x.chunk(2, dim=1)
    return value * gate.sigmoid()


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "avg_pool": lambda m, x: F.avg_pool2d(x, 3, stride=2, padding=1),
    "adaptive": lambda m, x: F.adaptive_max_pool2d(x, (3, 2)),
    "max_pool": lambda m, x: torch.max_pool2d(x, 2),
    "interpolate": lambda m, x: F.interpolate(x, (5, 9), mode="bilinear", align_corners=True),
    "interpolate like": lambda m, x: F.interpolate(F.max_pool2d(x, 2), x.shape[2:]),
    "interpolate by size": lambda m, x: F.interpolate(F.max_pool2d(x, 2), size=x.size()[2:]),
    "circular": lambda m, x: F.pad(x, (1, 2, 0, 3), mode="circular"),
    "pad": lambda m, x: F.pad(x, (1, 2, 0, 1), value=0.5),
    "mean of images": lambda m, x: x.mean((2, 3)),
    "kept mean of images": lambda m, x: x - torch.mean(x, dim=(-1, -2), keepdim=True).sigmoid(),
    "excitation": lambda m, x: x * m.conv2(F.adaptive_avg_pool2d(x, 1)).sigmoid(),
    "one activation": lambda m, x: m.act(x) * m.act(x.mean((2, 3), True) + 1) + m.act(m.conv2(x)),
    "mean of channels": lambda m, x: x.mean(1, keepdim=True) * x,
    "sum of channels": lambda m, x: x.sum(dim=1),
    "softmax": lambda m, x: F.softmax(x, dim=2),
    "log_softmax": lambda m, x: x.log_softmax(1),
    "reshape": lambda m, x: torch.reshape(F.relu(x), (x.shape[0], -1)),
    "view by features": lambda m, x: x.view(-1, 4 * 8 * 8) + 1,
    "halves": lambda m, x: _gated(x),
    "channel": lambda m, x: x[:, 1] + x[:, -1, ...] * m.shift,
    "some channels": lambda m, x: x[:, 1:3].clamp(0, 1),
    "dropout": lambda m, x: F.dropout(x, 0.0, m.training) + F.dropout2d(x, 0.0, m.training),
    "dims": lambda m, x: 1 - torch.where(x > 0, x, -2 * x) ** 2,
}


@pytest.mark.parametrize("case", FUNCTIONS)
@distributed(ranks=2, transports=["loopback"])
def test_function(P_world: Partition, case: str) -> None:
    check(P_world, Calls(FUNCTIONS[case]).double(), [1, 1, 2, 1], random_like_all((2, 4, 8, 8), 1))
