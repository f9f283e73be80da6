"""Indices, masks, sorting, sums along a dim, and plain mathematics."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE, TOKENS = "x: B C H W", "x: B T D"


@forward(IMAGE)
class BooleanMasks(nn.Module):
    """Cells chosen by a mask, of which nobody knows how many; written back by the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        mask = y > 0.1
        chosen = y[mask]
        out = torch.zeros_like(y)
        out[mask] = chosen * 2
        return chosen.mean(), out, torch.masked_select(y, ~mask).sum(), mask.sum()


@forward(IMAGE)
class TopPixels(nn.Module):
    """Top-k pixels of a flattened score, gathered features, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.features = nn.Conv2d(4, 1, 1), nn.Conv2d(4, 5, 3, padding=1)

    def forward(self, x):
        score = self.score(x).flatten(1)
        values, indices = torch.topk(score, 7, dim=1)
        features = self.features(x).flatten(2)
        chosen = torch.gather(features, 2, indices.unsqueeze(1).expand(-1, 5, -1))
        ys = torch.div(indices, x.shape[3], rounding_mode="floor")
        return chosen, values, ys, indices % x.shape[3]


@forward(IMAGE)
class IndexSelects(nn.Module):
    """index_select and lists of indices along a spatial dim, repeated and out of order."""

    def forward(self, x):
        index = torch.tensor([3, 0, 0, -1 % x.shape[2], 5])
        a = x.index_select(2, index)
        b = x[:, :, [1, 4, 2]][..., [-1, 0]]
        c = x[:, :, torch.arange(x.shape[2] - 1, -1, -1)]
        d = torch.take(x, torch.tensor([0, 7, 100]))
        return a, b, c, d, x[:, torch.tensor([True, False, True, True])]


@forward(IMAGE)
class IndexWrites(nn.Module):
    """index_fill, index_copy, index_put and ``scatter`` along a spatial dim."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(10))

    def forward(self, x):
        y = x.index_fill(2, torch.tensor([1, 6]), 0.25)
        z = y.index_copy(2, torch.tensor([0, 3]), y[:, :, 4:6] * 2)
        w = z.clone()
        w[:, :, torch.tensor([2, 5])] = w[:, :, [7, 8]].sin()
        w[:, 1, 4] = self.row[: w.shape[3]].mean()
        w.index_put_((torch.tensor([0]), torch.tensor([1])), torch.tensor(1.5))
        return w.scatter(2, torch.full((1, 4, 1, 3), 6), -1.0)


@forward(IMAGE)
class SoftArgmax(nn.Module):
    """Key points: softmax over all pixels, expected coordinates by linspace."""

    def forward(self, x):
        b, c, h, w = x.shape
        p = F.softmax(x.view(b, c, -1), dim=-1).view(b, c, h, w)
        ys = torch.linspace(-1, 1, h, device=x.device)
        xs = torch.linspace(-1, 1, w).type_as(x)
        return torch.stack([(p.sum(2) * xs).sum(-1), (p.sum(3) * ys).sum(-1)], dim=-1)


@forward(IMAGE)
class OwnNorms(nn.Module):
    """Norms by mean and var, ``var_mean``, std, unbiased and not, over spatial dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        a = (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()
        variance, mean = torch.var_mean(x, dim=[0, 2, 3], unbiased=False, keepdim=True)
        b = (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight
        c = x / (x.std(dim=(1, 2, 3), keepdim=True) + 0.1) - x.mean()
        d = x / x.norm(p=2, dim=(2, 3), keepdim=True) + torch.linalg.vector_norm(x, dim=1)[:, None]
        return a, b, c, d


@forward(IMAGE)
class LayerNormOverChannels(nn.Module):
    """ConvNeXt: norm over the last dim of a permuted tensor, and the same by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 7, padding=3, groups=4)
        self.norm, self.wide = nn.LayerNorm(4, eps=1e-6), nn.Linear(4, 16)
        self.narrow, self.gamma = nn.Linear(16, 4), nn.Parameter(1e-1 * torch.ones(4))

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(F.gelu(self.wide(y)))
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return (x - u) / torch.sqrt(s + 1e-6) + y.permute(0, 3, 1, 2)


@forward(IMAGE)
class GramMatrix(nn.Module):
    """Features times themselves over all pixels; distances; an inverse."""

    def forward(self, x):
        b, c, h, w = x.shape
        f = x.view(b, c, h * w)
        gram = torch.baddbmm(torch.eye(c).expand(b, c, c), f, f.transpose(1, 2), alpha=1 / (h * w))
        return gram, torch.linalg.inv(gram), torch.cdist(f, f).sum(), torch.logdet(gram)


@forward(IMAGE)
class BroadcastingOddly(nn.Module):
    """Fewer dims on either side, parameters along spatial dims, 0-dim tensors and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.row = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(1, 1))

    def forward(self, x):
        rows = torch.arange(x.shape[2]).to(x).view(-1, 1)
        columns = torch.linspace(0, 1, x.shape[3], dtype=x.dtype)
        y = self.scale * x + rows * self.row - columns
        z = (
            2 ** (-x.abs())
            + (1 - x) / torch.add(1, rows.T.mean())
            + x.mean((0, 2, 3))[:, None, None]
        )
        return y, z, torch.addcmul(y, x, rows, value=0.1), torch.lerp(x, y, 0.3), -x + x.sum()


@forward(IMAGE)
class TypesAndDevices(nn.Module):
    """``type_as``, ``to(other)``, ``.float()``, ``.long()``, ``.cpu()``, ``new_*``, ``*_like``."""

    def forward(self, x):
        a = torch.ones(x.shape[-1]).type_as(x)
        b = torch.arange(x.shape[2]).to(x).to(x.device)
        c = (x > 0).to(x.dtype) + (x < 0).type(torch.float64) + x.new_ones(x.shape[2:])
        d = x.float().double() + x.round().long().to(x)
        return x * a + b[:, None], c, d, x.cpu().to("cpu", torch.float64), x.to(a), x.bool().any()


@forward(IMAGE, "target: B H W int", step=1)
class LossInForward(nn.Module):
    """Detectors return losses in training: cross entropy of whole targets, dice, mse."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x, target):
        y = self.conv(x)
        onehot = F.one_hot(target, 4).movedim(-1, 1).to(y)
        p = y.softmax(1)
        dice = 1 - (2 * (p * onehot).sum((2, 3)) + 1) / (p.sum((2, 3)) + onehot.sum((2, 3)) + 1)
        return {"dice": dice.mean(), "mse": F.mse_loss(y, x), "l1": F.smooth_l1_loss(y, onehot)}


@forward(IMAGE, "y: B C H W")
class Similarities(nn.Module):
    """Cosine similarity, pairwise distances and a correlation volume of two images."""

    def forward(self, x, y):
        b, c, h, w = x.shape
        volume = torch.matmul(x.view(b, c, h * w).transpose(1, 2), y.view(b, c, h * w)) / c**0.5
        return F.cosine_similarity(x, y, dim=1), volume.view(b, h, w, 1, h, w).amax((4, 5))


@forward(IMAGE)
class LocalCorrelation(nn.Module):
    """Cost volume: shifted slices of a padded image, multiplied and stacked."""

    def forward(self, x):
        _, _, h, w = x.shape
        padded = F.pad(x, (2, 2, 2, 2))
        costs = [
            (x * padded[:, :, i : i + h, j : j + w]).mean(1)
            for i in range(0, 5, 2) for j in range(0, 5, 2)
        ]  # fmt: skip
        return torch.stack(costs, 1).softmax(1)


@forward(IMAGE)
class BilinearByHand(nn.Module):
    """Bilinear sampling by floor, clamp, and flat indices."""

    def forward(self, x):
        h = x.size(2)
        ys = torch.linspace(0.3, h - 1.4, 5).to(x)
        low = ys.floor().long().clamp(0, h - 1)
        high = (low + 1).clamp(max=h - 1)
        f = (ys - low).view(1, 1, -1, 1)
        return x[:, :, low] * (1 - f) + x[:, :, high] * f


@forward(IMAGE)
class ConnectedByOperators(nn.Module):
    """Comparisons, ``~``, ``&``, ``|``, ``%``, ``//``, reflected operators, ``torch.*``."""

    def forward(self, x):
        mask = (x > 0) & ~(x > 1) | (x.abs() < 0.1)
        y = torch.fmod(x, 0.7) + torch.remainder(x, 0.3) * mask
        z = torch.div(x, 0.4, rounding_mode="floor") + (x.detach() // 0.5) + x % 2
        u = torch.maximum(x, y) - torch.minimum(x, -y) + torch.hypot(x, y + 3)
        return mask, y, z, u, torch.sub(x, y, alpha=2), 3 - x, 1 / (x.abs() + 1), x.atan2(y + 2)


@forward(IMAGE)
class Quantiles(nn.Module):
    """bucketize, searchsorted, unique, histc and bincount of cells; a table read by them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.register_buffer("edges", torch.tensor([-1.0, -0.3, 0.3, 1.0]))

    def forward(self, x):
        bins = torch.bucketize(x.detach(), self.edges)
        counts = torch.bincount(bins.flatten(), minlength=5)
        found = torch.searchsorted(self.edges, x.detach().contiguous())
        kinds, inverse = torch.unique(bins[:, 0], return_inverse=True)
        histogram = torch.histc(x.detach(), bins=4, min=-2, max=2)
        return self.table(bins).mean((2, 3)) + x.mean(), counts, found, kinds, inverse, histogram
