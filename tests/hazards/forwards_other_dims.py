"""Signals, volumes and images without spare cells: other dims, empty blocks, ATen's spellings."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE, VOLUME, SIGNAL = "x: B C H W", "x: B C Z H W", "x: B C L"
THIN = ((1, 1, 4, 1), (1, 1, 2, 3), (1, 1, 6, 1))


@forward(VOLUME, Z=6, H=7, W=5)
class VolumeUNet(nn.Module):
    """A 3-D U-Net: strided down, transposed up, instance norm, leaky ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.InstanceNorm3d(4))
        self.down, self.up = nn.Conv3d(4, 6, 2, stride=2), nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.out = nn.Conv3d(8, 2, 1)

    def forward(self, x):
        skip = F.leaky_relu(self.a(x), 0.01, inplace=True)
        y = self.up(self.down(skip).relu_())
        missing = [n - m for n, m in zip(skip.shape[2:], y.shape[2:], strict=True)]
        y = F.pad(y, [0, missing[2], 0, missing[1], 0, missing[0]])
        return self.out(torch.cat([y, skip], 1))


@forward(VOLUME, Z=5, H=6, W=5)
class VideoBlock(nn.Module):
    """(2+1)-D convolutions; frames joined with the batch for a 2-D layer and back."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Conv2d(4, 4, 3, padding=1)
        self.time = nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0))
        self.norm = nn.BatchNorm3d(4)

    def forward(self, x):
        b, c, t, h, w = x.shape
        y = x.transpose(1, 2).reshape(b * t, c, h, w)
        y = self.space(y).view(b, t, c, h, w).transpose(1, 2)
        return self.norm(self.time(y)) + x


@forward(VOLUME, Z=4, H=4, W=6)
class PermutedVolume(nn.Module):
    """Slices along each of three dims through one 2-D layer (triplanar)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = torch.stack([self.conv(part) for part in x.unbind(2)], dim=2)
        z = torch.stack([self.conv(part) for part in torch.unbind(x, 4)], dim=4)
        return y + z - x.amax(2, keepdim=True)


@forward(SIGNAL)
class WaveNetBlock(nn.Module):
    """Causal dilated convolutions by padding on the left, gates, skip sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=d) for d in (1, 2, 4))
        self.skip = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        total = 0
        for layer in self.layers:
            y = layer(F.pad(x, (layer.dilation[0], 0)))
            a, b = y.chunk(2, dim=1)
            x = x + a.tanh() * b.sigmoid()
            total = total + self.skip(x)
        return total


@forward(SIGNAL, L=15)
class SignalEncoder(nn.Module):
    """Strided convolutions and a group norm, up again by ``repeat_interleave``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(4, 6, 5, stride=2, padding=2)
        self.b = nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, 6)

    def forward(self, x):
        y = self.norm(self.a(x)).relu()
        z = self.b(y)[:, :, : x.shape[2]]
        return x - z, y.repeat_interleave(2, -1), F.avg_pool1d(z, 3, 1, 1), F.max_pool1d(y, 2)


@forward(SIGNAL)
class StatisticsPooling(nn.Module):
    """Speaker embeddings: mean and standard deviation over time, weighted by an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Conv1d(4, 1, 1), nn.Linear(8, 3)

    def forward(self, x):
        w = self.score(x).softmax(2)
        mean = (x * w).sum(2)
        std = ((x**2 * w).sum(2) - mean**2).clamp_min(1e-6).sqrt()
        return self.out(torch.cat([mean, std], dim=1))


@forward(SIGNAL, L=13)
class InterpolatedSignal(nn.Module):
    """Linear interpolation, sliding windows, exponential averages by a loop."""

    def forward(self, x):
        y = F.interpolate(x, size=x.shape[-1] * 2 + 1, mode="linear", align_corners=False)
        frames = F.pad(x, (1, 1), mode="reflect").unfold(-1, 3, 1) * torch.hann_window(3).to(x)
        state, found = x[..., 0], []
        for t in range(x.shape[-1]):
            state = 0.8 * state + 0.2 * x[..., t]
            found.append(state)
        return y, frames.sum(-1), torch.stack(found, -1)


@forward(IMAGE, H=5, W=6, grids=THIN)
class FewerRowsThanWorkers(nn.Module):
    """Strides until some workers have no row: their results must stay tied to the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, stride=4, padding=1)
        self.b, self.norm = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.a(x).relu()
        z = self.norm(self.b(y) if min(y.shape[2:]) > 1 else y)
        return F.interpolate(z, size=x.shape[2:], mode="bilinear") + x


@forward(IMAGE, H=3, W=4, grids=THIN)
class EmptyFromTheStart(nn.Module):
    """Fewer rows than workers in the input; pads, norms, a softmax and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x):
        y = self.norm(self.conv(x))
        z = F.pad(y, (0, 0, 1, 1), mode="replicate")
        return z.softmax(2), y.amax((2, 3)), torch.cat([y, x], 2).mean(2), y.flatten(2).cumsum(2)


@forward(IMAGE, H=8, W=6, grids=THIN)
class OneCellLeft(nn.Module):
    """Dims of size one after a stride: squeezed, broadcast back, and used as gates."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Conv2d(4, 4, (3, 1), stride=(8, 1), padding=(1, 0))

    def forward(self, x):
        y = self.rows(x)[:, :, :1]
        assert y.shape[2] == 1
        return x * y.sigmoid(), y.squeeze(2), (x - y).var(2, unbiased=False)


@forward(IMAGE)
class AtenSpellings(nn.Module):
    """``torch.ops.aten`` and ``torch.*`` names, with arguments in another order than ``F``'s."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        w, b, n = self.conv.weight, self.conv.bias, self.norm
        y = torch.conv2d(x, w, b, (1, 1), (1, 1))
        z = torch.batch_norm(
            y, n.weight, n.bias, n.running_mean, n.running_var, self.training, 0.1, 1e-5, False
        )
        u = torch.instance_norm(y, n.weight, n.bias, None, None, True, 0.1, 1e-5, False)
        v = torch.group_norm(y, 2, n.weight, n.bias)
        return z, u + v, torch.relu(y), torch.max_pool2d(y, 2), torch.softmax(y, 2)


@forward(IMAGE)
class AtenOverloads(nn.Module):
    """``torch.ops.aten`` functions called by their full names, as exported programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        aten = torch.ops.aten
        y = aten.convolution.default(x, self.w, self.b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        y = aten.add.Tensor(aten.relu.default(y), x, alpha=0.5)
        z = aten.cat.default([y, x], 1)
        return aten.mean.dim(z, [2, 3], True), aten.slice.Tensor(z, 2, 1, 4), aten.sum.default(y)


@forward(IMAGE)
class OtherSpellings(nn.Module):
    """One function as method, in ``torch``, in ``F`` and in ``torch.special`` or ``linalg``."""

    def forward(self, x):
        a = torch.special.expit(x) + x.sigmoid() + torch.sigmoid(x) + F.sigmoid(x)
        b = torch.nn.functional.softmax(x, dim=2) - torch.special.softmax(x, 2) * 2 + x.softmax(2)
        c = torch.linalg.norm(x, dim=(2, 3)) + x.norm(dim=(2, 3)) * torch.linalg.matrix_norm(x)
        d = torch.matmul(x, x.mT) + x @ x.transpose(-1, -2) + x.matmul(torch.adjoint(x))
        return a, b, c, d, torch.permute(x, (0, 2, 3, 1)) + x.movedim(1, 3), torch.swapaxes(x, 2, 3)


@forward(IMAGE)
class LinearOverSpatialDims(nn.Module):
    """Linear layers and ``matmul`` over the last dim, which is cut; an outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 10))

    def forward(self, x):
        w = F.pad(self.w, (0, x.shape[3] - 10))
        y = F.linear(x, w)
        z = torch.tensordot(x, w, dims=([3], [1])) + x.matmul(w.t())
        return y, z, torch.kron(x.mean((0, 1)), torch.eye(2)), torch.trace(x[0, 0] @ x[1, 1].T)


@forward(IMAGE)
class MorphologyAndBlur(nn.Module):
    """Erosion by a negative max pool, a Gaussian kernel made in the forward, a Sobel buffer."""

    def __init__(self) -> None:
        super().__init__()
        sobel = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
        self.register_buffer("sobel", sobel.view(1, 1, 3, 3).repeat(4, 1, 1, 1), persistent=False)

    def forward(self, x):
        eroded = -F.max_pool2d(-x, 3, 1, 1)
        t = torch.arange(-2, 3, dtype=x.dtype)
        g = torch.softmax(-(t**2) / 2, 0)
        kernel = torch.outer(g, g).expand(x.size(1), 1, 5, 5)
        blurred = F.conv2d(F.pad(x, [2] * 4, mode="reflect"), kernel, groups=x.size(1))
        return eroded, blurred, F.conv2d(x, self.sobel, padding=1, groups=4).square().sum()


@forward(IMAGE)
class ChannelsLast(nn.Module):
    """``memory_format``: asked for, kept and lost."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.conv(x.contiguous(memory_format=torch.channels_last))
        y = x.to(memory_format=torch.contiguous_format)
        return y.view(y.shape[0], -1).view_as(y) * 2


@forward(IMAGE, H=14, W=13, step=0)
class FlattenThenLinear(nn.Module):
    """LeNet: convolutions and pools, all features flattened, linear layers, a log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 6, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2),
            nn.Conv2d(6, 4, 3), nn.ReLU(True), nn.MaxPool2d(2, 2),
        )  # fmt: skip
        self.classes = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x):
        return F.log_softmax(self.classes(self.features(x)), dim=1)


@forward(IMAGE)
class LoopOverBatch(nn.Module):
    """``for sample in x``, ``zip``, ``enumerate`` and ``len``; samples stacked again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        found = [self.conv(sample.unsqueeze(0))[0] * (i + 1) for i, sample in enumerate(x)]
        y = torch.stack([a - b.mean() for a, b in zip(found, x, strict=True)])
        return y, torch.cat([x[i : i + 1].sin() for i in range(len(x))])
