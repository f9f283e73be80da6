"""The network of the U-Net example, in plain torch."""

from __future__ import annotations

import torch
from torch import nn


def conv_block(channels_in: int, channels: int, groups: int) -> nn.Sequential:
    """Return two convolutions that preserve the size, each followed by group normalization."""
    return nn.Sequential(
        nn.Conv3d(channels_in, channels, 3, padding=1, bias=False),
        nn.GroupNorm(groups, channels),
        nn.ReLU(inplace=True),
        nn.Conv3d(channels, channels, 3, padding=1, bias=False),
        nn.GroupNorm(groups, channels),
        nn.ReLU(inplace=True),
    )


class UNet3d(nn.Module):
    """A 3-D U-Net, whose levels halve the sides and double the channels, and then reverse this.

    Maps volumes ``[B, channels_in, x, y, z]``, whose sides are multiples of ``2 ** (levels - 1)``,
    to scores ``[B, classes, x, y, z]``.

    Args:
        channels_in: channels of the input.
        classes: channels of the output.
        width: channels of the first level; a multiple of ``groups``.
        levels: number of resolutions, including the full one.
        groups: number of groups of channels that are normalised together.

    Source:
        Çiçek et al. 2016, arXiv:1606.06650, with group normalization (Wu & He 2018).
    """

    def __init__(
        self, channels_in: int, classes: int, width: int = 8, levels: int = 4, groups: int = 4
    ) -> None:
        super().__init__()
        channels = [width << level for level in range(levels)]
        before = [channels_in, *channels[:-1]]
        self.down = nn.ModuleList(
            conv_block(a, b, groups) for a, b in zip(before, channels, strict=True)
        )
        self.pool = nn.MaxPool3d(2)
        self.grow = nn.ModuleList(
            nn.ConvTranspose3d(2 * n, n, 2, stride=2) for n in reversed(channels[:-1])
        )
        self.up = nn.ModuleList(conv_block(2 * n, n, groups) for n in reversed(channels[:-1]))
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)
