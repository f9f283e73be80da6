"""Networks as their authors write them, in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.resnet import ResNet18


class LeNet5(nn.Module):
    """LeCun et al. 1998, with functions in the forward, for images [B, 1, 28, 28]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.tanh(self.conv2(x)), (2, 2))
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def double_conv(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels_in, channels, 3, padding=1),
        nn.GroupNorm(2, channels),
        nn.LeakyReLU(0.1),
        nn.Conv3d(channels, channels, 3, padding=1),
        nn.GroupNorm(2, channels),
        nn.PReLU(channels),
    )


class UNet3d(nn.Module):
    """Çiçek et al. 2016, with group normalization and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([double_conv(1, 2), double_conv(2, 4)])
        self.pool = nn.MaxPool3d(2)
        self.bottom = double_conv(4, 4)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose3d(4, 4, 2, stride=2), nn.ConvTranspose3d(4, 2, 2, stride=2)]
        )
        self.up = nn.ModuleList([double_conv(8, 4), double_conv(4, 2)])
        self.head = nn.Conv3d(2, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = torch.cat([skips.pop(), grow(x)], dim=1)
            x = block(x)
        return self.head(x)


class ASPPPooling(nn.Sequential):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels_in, channels, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2:]
        for module in self:
            x = module(x)
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class ASPP(nn.Module):
    """Chen et al. 2017: dilated convolutions beside each other, and the image's mean."""

    def __init__(self) -> None:
        super().__init__()
        branches: list[nn.Module] = [nn.Conv2d(3, 4, 1)]
        branches += [nn.Conv2d(3, 4, 3, padding=d, dilation=d) for d in (2, 4, 6)]
        self.convs = nn.ModuleList([*branches, ASPPPooling(3, 4)])
        self.project = nn.Sequential(nn.Conv2d(20, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.scale = nn.Parameter(torch.full((4, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(torch.cat([conv(x) for conv in self.convs], dim=1))
        return y * self.scale + 1


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(2, channels)
        self.conv1 = nn.Conv3d(channels, channels, 3, padding=0)
        self.norm2 = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv3d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.pad(F.silu(self.norm1(x)), (1, 1, 1, 1, 2, 0))
        h = self.conv1(h)
        h = self.conv2(F.silu(self.norm2(h)))
        return x + h


class VideoDecoder(nn.Module):
    """The decoder of a video autoencoder: nearest upsampling, and padding of past frames alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv3d(2, 8, 3, padding=1)
        self.stages = nn.ModuleList([ResidualBlock(8), ResidualBlock(4)])
        self.narrow = nn.Conv3d(8, 4, 3, padding=1)
        self.upsample = nn.Upsample(scale_factor=(1, 2, 2), mode="nearest")
        self.norm_out = nn.GroupNorm(4, 4)
        self.act = nn.SiLU()
        self.conv_out = nn.Conv3d(4, 3, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.stages[0](self.conv_in(z))
        x = self.narrow(self.upsample(x))
        x = F.interpolate(self.stages[1](x), scale_factor=2.0, mode="nearest")
        return self.conv_out(self.act(self.norm_out(x)))


class ConvNeXtBlock(nn.Module):
    """Liu et al. 2022: channels last for the dense layers, and a learned scale per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class Classifier(nn.Module):
    """ConvNeXt blocks, squeeze and excitation, and the mean of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 2, stride=2)
        self.blocks = nn.Sequential(ConvNeXtBlock(4), ConvNeXtBlock(4))
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.excite = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1), nn.Sigmoid())
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x))
        x = x * self.excite(self.squeeze(x))
        return self.head(self.norm(x.mean([-2, -1])))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.act = nn.PReLU(2)
        self.inner = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm(self.conv(x)))
        return torch.add(x, self.inner(F.dropout(y, 0.0, self.training)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2, 1, 1), 0.7))
        self.register_buffer("shift", torch.tensor(0.25))
        self.shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Pyramid(nn.Module):
    """One block at three resolutions, called twice at the first one, and one head for all."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Conv2d(2, 3, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        fine = self.block(self.block(x))
        middle = self.block(self.pool(fine))
        coarse = self.block(self.pool(middle))
        return [self.head(fine), self.head(middle), self.head(input=coarse)]


class OneCell(nn.Module):
    """A convolution whose kernel covers the image, beside the image, its rows and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, (5, 7))
        self.rows = nn.Conv2d(2, 2, (1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.conv(x))
        y = x * gate + self.rows(x)
        return torch.where(y > 0, y - x.mean((2, 3), keepdim=True), gate * 2)


class Several(nn.Module):
    """Two tensors in, one of them by name, and a dict of a tuple's parts out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.mix = Mix()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, factor: float = 2.0) -> Any:
        value, gate = self.conv(x).chunk(2, dim=1)
        mixed, rest = self.mix(value, gate, scale=3)
        return {"mixed": mixed * mask * factor, "rest": F.max_pool2d(rest, 2)}


class Mix(nn.Module):
    def forward(self, value: torch.Tensor, gate: torch.Tensor, scale: int) -> Any:
        return value * gate.sigmoid() * scale, value + gate


# The network, the shape of its input, and of the partitions it is tested on.
NETWORKS = {
    "lenet": (LeNet5, (5, 1, 28, 28), ([1, 1, 2, 2], [1, 1, 3, 1], [2, 1, 1, 2])),
    "resnet": (partial(ResNet18, 4, 5), (5, 3, 45, 38), ([1, 1, 2, 2], [1, 1, 3, 1])),
    "unet": (UNet3d, (2, 1, 8, 8, 12), ([1, 1, 1, 2, 2], [1, 1, 1, 1, 3])),
    "aspp": (ASPP, (2, 3, 17, 14), ([1, 1, 2, 2], [1, 1, 3, 1])),
    "convnext": (Classifier, (3, 3, 18, 14), ([1, 1, 2, 2], [1, 1, 3, 1])),
    "video": (VideoDecoder, (2, 2, 4, 5, 6), ([1, 1, 2, 2, 1], [1, 1, 1, 3, 1])),
}
