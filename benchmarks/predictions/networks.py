"""Networks of published measurements, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from gpudist import Plan
from gpudist.sbp import broadcast, split


def _convolution(channels_in: int, channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels_in, channels, 3, stride, padding=1, bias=False),
        nn.InstanceNorm3d(channels, affine=True),
        nn.ReLU(inplace=True),
    )


class KidneyUNet(nn.Module):
    """3-D U-Net of MLPerf Training's image segmentation, for crops of KiTS19.

    Args:
        channels: channels of the levels, the full resolution first; the last is repeated below.
        classes: channels of the output.
    """

    def __init__(
        self, channels: tuple[int, ...] = (32, 64, 128, 256, 320), classes: int = 3
    ) -> None:
        super().__init__()
        self.first = nn.Sequential(
            _convolution(1, channels[0]), _convolution(channels[0], channels[0])
        )
        levels = [*channels, channels[-1]]
        self.down = nn.ModuleList(
            nn.Sequential(_convolution(a, b, 2), _convolution(b, b)) for a, b in pairwise(levels)
        )
        upward = levels[::-1]
        pairs = list(pairwise(upward))
        self.grow = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(
            nn.Sequential(_convolution(2 * b, b), _convolution(b, b)) for _, b in pairs
        )
        self.head = nn.Conv3d(channels[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = [x]
        for block in self.down:
            x = block(x)
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], dim=1))
        return self.head(x)


class Residual(nn.Module):
    """Two normalised convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(1, channels_in), nn.SiLU(), nn.Conv3d(channels_in, channels, 3, padding=1),
            nn.GroupNorm(1, channels), nn.SiLU(), nn.Conv3d(channels, channels, 3, padding=1),
        )  # fmt: skip
        is_same = channels_in == channels
        self.shortcut = nn.Identity() if is_same else nn.Conv3d(channels_in, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.body(x)


def video_decoder() -> nn.Sequential:
    """Convolutional decoder of videos: 8 x 8 pixels and 4 frames for each latent cell.

    It has the channels and levels of common video VAEs, without attention and caches. The network
    of the published measurement is not public.
    """
    layers: list[nn.Module] = [nn.Conv3d(16, 384, 3, padding=1)]
    layers += [Residual(384, 384), Residual(384, 384)]
    before = 384
    for channels, factors in ((384, (2, 2, 2)), (384, (2, 2, 2)), (192, (1, 2, 2)), (96, None)):
        for _ in range(3):
            layers.append(Residual(before, channels))
            before = channels
        if factors is not None:
            layers.append(nn.Upsample(scale_factor=factors))
            layers.append(nn.Conv3d(channels, channels // 2, (1, 3, 3), padding=(0, 1, 1)))
            before = channels // 2
    layers += [nn.GroupNorm(1, 96), nn.SiLU(), nn.Conv3d(96, 3, 3, padding=1)]
    return nn.Sequential(*layers)


def whole_below_32(grid: Sequence[int]) -> Plan:
    """Plan in which the workers of a sample split the levels of ``KidneyUNet`` down to 32 cells.

    Below, each of them computes the whole sample, and each gets the whole output for its loss.

    Args:
        grid: partition of the input over samples and one dim of space.
    """
    dim = next(dim for dim, parts in enumerate(grid) if dim and parts > 1)
    workers, plan = (grid[0], grid[dim]), Plan()
    plan.layout("down.2", [split(0), broadcast], at="input", grid=workers)
    plan.layout("grow.2", [split(0), split(dim)], at="input", grid=workers)
    plan.layout("head", [split(0), broadcast], grid=workers)
    return plan


PLANS: dict[str, Callable[[Sequence[int]], Plan]] = {"whole below 32": whole_below_32}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "kidney u-net": KidneyUNet,
    "video decoder": video_decoder,
}
