"""Images: convolutions, padding, resampling and attention over channels, as networks have them."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE = "x: B C H W"


@forward(IMAGE)
class SqueezeExcitation(nn.Module):
    """Channels scaled by a function of their mean over all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        x = self.conv(x)
        b, c, _, _ = x.size()
        scale = F.adaptive_avg_pool2d(x, 1).view(b, c)
        scale = torch.sigmoid(self.up(F.relu(self.down(scale)))).view(b, c, 1, 1)
        return x * scale.expand_as(x)


@forward(IMAGE, H=11, W=9)
class ResidualBlock(nn.Module):
    """A residual block with batch norms and ReLUs in place, on an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


@forward(IMAGE, H=13, W=11)
class UNetWithCrop(nn.Module):
    """A U-Net whose skip is cropped to the upsampled size, as the first U-Nets did."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        skip = F.relu(self.down(x))
        low = F.relu(self.low(F.max_pool2d(skip, 2)))
        up = self.up(low)
        dy, dx = skip.size(2) - up.size(2), skip.size(3) - up.size(3)
        skip = skip[:, :, dy // 2 : dy // 2 + up.size(2), dx // 2 : dx // 2 + up.size(3)]
        return self.out(torch.cat([skip, up], dim=1))


@forward(IMAGE, H=11, W=9)
class UNetWithPad(nn.Module):
    """A U-Net that pads the upsampled tensor to the skip's size by ``F.pad``, odd differences."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(8, 3, 3, padding=1)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x):
        x1 = F.leaky_relu(self.a(x), 0.1)
        x2 = F.interpolate(self.b(self.pool(x1)), scale_factor=2)
        dy, dx = x1.size()[2] - x2.size()[2], x1.size()[3] - x2.size()[3]
        x2 = F.pad(x2, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.c(torch.cat((x1, x2), 1))


@forward(IMAGE)
class ReflectThenConv(nn.Module):
    """Reflection padding before valid convolutions, as style transfer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.ReflectionPad2d(3), nn.Conv2d(4, 6, 7), nn.InstanceNorm2d(6, affine=True), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


@forward(IMAGE, H=6, W=5)
class PixelShuffleByHand(nn.Module):
    """Depth to space by view and permute, as it is written without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 12, 1)

    def forward(self, x):
        x = self.conv(x)
        b, c, h, w = x.shape
        x = x.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
        return x.reshape(b, c // 4, h * 2, w * 2).sigmoid()


@forward(IMAGE, step=2)
class SpaceToDepth(nn.Module):
    """Focus of YOLOv5: four slices with step two, concatenated over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        parts = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
        return F.silu(self.conv(torch.cat(parts, 1)))


@forward(IMAGE)
class FeaturePyramid(nn.Module):
    """Top-down sums, each upsampled to ``size=`` of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, 6, 3, stride=2, padding=1) for c in (4, 6, 6))
        self.lateral = nn.ModuleList(nn.Conv2d(6, 5, 1) for _ in range(3))

    def forward(self, x):
        features = []
        for layer in self.down:
            x = layer(x).relu()
            features.append(x)
        found = [lateral(f) for lateral, f in zip(self.lateral, features, strict=True)]
        for i in range(len(found) - 1, 0, -1):
            size = found[i - 1].shape[-2:]
            found[i - 1] = found[i - 1] + F.interpolate(found[i], size=size, mode="nearest")
        return found


@forward(IMAGE)
class SpatialTransformer(nn.Module):
    """``affine_grid`` and ``grid_sample`` with parameters found from the whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(4, 6)

    def forward(self, x):
        theta = self.where(x.mean((2, 3))).view(-1, 2, 3) * 0.1
        theta = theta + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


@forward(IMAGE, "flow: B 2 H W")
class WarpByFlow(nn.Module):
    """Backward warping by optical flow: meshgrid, normalised coordinates, ``grid_sample``."""

    def forward(self, x, flow):
        h, w = x.shape[2:]
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        base = torch.stack((xs, ys), dim=0).to(flow).unsqueeze(0)
        grid = (base + 0.3 * flow).permute(0, 2, 3, 1)
        scale = torch.tensor([w - 1, h - 1], dtype=x.dtype, device=x.device)
        return F.grid_sample(x, 2 * grid / scale - 1, align_corners=True)


@forward(IMAGE, H=10, W=8)
class UnfoldAndFold(nn.Module):
    """Patches of ``F.unfold``, modified, and joined by ``F.fold`` with counts of overlaps."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(36, 36)

    def forward(self, x):
        patches = F.unfold(x, 3, padding=1, stride=2)
        patches = self.mix(patches.transpose(1, 2)).transpose(1, 2)
        ones = F.unfold(torch.ones_like(x), 3, padding=1, stride=2)
        total = F.fold(patches, x.shape[-2:], 3, padding=1, stride=2)
        return total / F.fold(ones, x.shape[-2:], 3, padding=1, stride=2).clamp(min=1)


@forward(IMAGE)
class DynamicFilter(nn.Module):
    """A kernel for each pixel: softmax over the taps, applied by unfold and einsum (CARAFE)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(4, 9, 3, padding=1)

    def forward(self, x):
        b, c, h, w = x.shape
        taps = torch.softmax(self.kernel(x), dim=1).view(b, 9, h, w)
        patches = F.unfold(x, 3, padding=1).view(b, c, 9, h, w)
        return torch.einsum("bkhw,bckhw->bchw", taps, patches)


@forward(IMAGE)
class UnpoolWithIndices(nn.Module):
    """SegNet: indices of a max pool come back in ``max_unpool2d`` with the size before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        y = self.conv(x)
        small, indices = self.pool(y)
        return self.unpool(small * 2, indices, output_size=y.size())


@forward(IMAGE)
class AtrousPyramid(nn.Module):
    """ASPP: dilated branches, and the image's mean brought back to its size."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Conv2d(4, 3, 3 if d else 1, padding=d, dilation=d or 1) for d in (0, 2, 4)
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1), nn.ReLU())

    def forward(self, x):
        found = [branch(x) for branch in self.branches]
        mean = self.pooled(x)
        found.append(F.interpolate(mean, size=x.shape[2:], mode="bilinear", align_corners=False))
        return torch.cat(found, dim=1)


@forward(IMAGE)
class SpatialAttention(nn.Module):
    """CBAM: mean and max over channels, a wide kernel, a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x):
        mean = torch.mean(x, dim=1, keepdim=True)
        most, _ = torch.max(x, dim=1, keepdim=True)
        return x * self.conv(torch.cat([mean, most], dim=1)).sigmoid()


@forward(IMAGE)
class CoordinateAttention(nn.Module):
    """Means over rows and over columns, joined along a spatial dim, convolved, and split again."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        h, w = x.shape[2:]
        rows = x.mean(3, keepdim=True)
        columns = x.mean(2, keepdim=True).permute(0, 1, 3, 2)
        y = F.hardswish(self.mix(torch.cat([rows, columns], dim=2)))
        rows, columns = torch.split(y, [h, w], dim=2)
        return x * rows.sigmoid() * columns.permute(0, 1, 3, 2).sigmoid()


@forward(IMAGE)
class ChannelShuffle(nn.Module):
    """ShuffleNet: chunk, depthwise branch, concatenation, groups transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Conv2d(2, 2, 3, padding=1, groups=2)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        x = torch.cat((a, self.branch(b)), dim=1)
        n, c, h, w = x.data.size()
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
