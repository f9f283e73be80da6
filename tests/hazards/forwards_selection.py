"""Cells chosen, ordered, counted and routed by their values."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE, TOKENS, SIGNAL = "x: B C H W", "x: B T D", "x: B C L"


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@forward(IMAGE)
class FoundPositions(Conv):
    """``nonzero`` in both forms, ``argwhere``, one argument of ``where``, and cells read there."""

    def forward(self, x):
        y = self.conv(x)
        rows, columns = torch.nonzero(y[0, 0] > 0.2, as_tuple=True)
        samples, _, _, _ = torch.where(y.detach() > 0)
        at = torch.argwhere(y[:, 0] > y.detach().mean())
        read = y[at[:, 0], 1, at[:, 1], at[:, 2]]
        return y[0, :, rows, columns].sum(1), samples.bincount(), at, read.mean(), len(rows)


@forward(IMAGE)
class PeaksOfHeatmaps(Conv):
    """CenterNet: cells equal to their neighbourhood's maximum, the best of all, and features."""

    def forward(self, x):
        heat = self.conv(x).sigmoid()
        b, c, _, w = heat.shape
        peaks = heat * (F.max_pool2d(heat, 3, stride=1, padding=1) == heat).to(heat.dtype)
        scores, at = torch.topk(peaks.view(b, c, -1), 4)
        best, which = torch.topk(scores.view(b, -1), 6)
        at = at.view(b, -1, 1).gather(1, which.unsqueeze(2).expand(-1, -1, 1))
        features = x.permute(0, 2, 3, 1).contiguous().view(b, -1, c)
        return best, at.squeeze(2) // w, features.gather(1, at.expand(-1, -1, c))


@forward(IMAGE)
class SuppressedBoxes(Conv):
    """A greedy suppression of overlapping intervals: a loop until no candidate is left."""

    def forward(self, x):
        score = self.conv(x).mean((0, 1, 2))
        start = torch.arange(len(score), dtype=x.dtype) * 0.7
        order, kept = score.detach().argsort(descending=True), []
        while order.numel() > 0:
            best = order[0]
            kept.append(best)
            if order.numel() == 1:
                break
            gap = (start[order[1:]] - start[best]).abs()
            order = order[1:][gap > 1.5]
        kept = torch.stack(kept)
        return score[kept], kept, score.new_zeros(len(score)).index_fill(0, kept, 1.0)


@forward(IMAGE)
class WritesByMask(Conv):
    """Assignments and sums by masks of fewer dims, ``masked_scatter`` and accumulated indices."""

    def forward(self, x):
        y = self.conv(x)
        rows = torch.arange(y.shape[2]) % 2 == 0
        z = y.clone()
        z[:, :, rows] = 0.5
        z[y > 0.3] += 1.0
        z[..., 0][z[..., 1] < 0] = -1.0
        first = torch.tensor([0, 1, 0])
        w = y.index_put((first, first), y[0, 0], accumulate=True)
        return z, w, y.masked_scatter(y > 0, torch.arange(y.numel(), dtype=y.dtype))


@forward(IMAGE)
class ReducedBySegments(Conv):
    """``scatter_reduce`` by mean and maximum, ``index_reduce``, superpixels of a label image."""

    def forward(self, x):
        y = self.conv(x)
        b, c, h, w = y.shape
        labels = (torch.arange(h)[:, None] // 4 * 3 + torch.arange(w) // 4).view(1, 1, -1)
        index = labels.expand(b, c, -1)
        count = int(labels.max()) + 1
        mean = y.new_zeros(b, c, count).scatter_reduce(2, index, y.flatten(2), "mean")
        most = torch.full((b, c, count), -9.0).to(y)
        most = most.scatter_reduce(2, index, y.flatten(2), reduce="amax", include_self=False)
        rows = y.new_ones(b, c, 2, w).index_reduce(2, torch.arange(h) % 2, y, "mean")
        return mean, most, rows, mean.gather(2, index).view_as(y)


@forward("x: B C T")
class GraphOfNeighbours(nn.Module):
    """DGCNN: nearest neighbours in feature space, gathered by flat indices, edges pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        b, c, n = x.shape
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        square = torch.sum(x**2, dim=1, keepdim=True)
        index = (-square - inner - square.transpose(2, 1)).topk(k=3, dim=-1)[1]
        index = (index + torch.arange(0, b, device=x.device).view(-1, 1, 1) * n).view(-1)
        points = x.transpose(2, 1).contiguous()
        near = points.view(b * n, -1)[index, :].view(b, n, 3, c)
        points = points.view(b, n, 1, c).repeat(1, 1, 3, 1)
        edges = torch.cat((near - points, points), dim=3).permute(0, 3, 1, 2).contiguous()
        return F.leaky_relu(self.edge(edges), 0.2).max(dim=-1, keepdim=False)[0]


@forward("x: B T 3")
class FarthestPoints(nn.Module):
    """PointNet++: points chosen one by one, each the farthest from those before."""

    def forward(self, x):
        b, n, _ = x.shape
        chosen = torch.zeros(b, 4, dtype=torch.long, device=x.device)
        distance = torch.ones(b, n, dtype=x.dtype, device=x.device) * 1e10
        farthest = torch.zeros(b, dtype=torch.long)
        batch = torch.arange(b, dtype=torch.long)
        for i in range(4):
            chosen[:, i] = farthest
            centroid = x[batch, farthest, :].view(b, 1, 3)
            d = torch.sum((x - centroid) ** 2, -1).detach()
            mask = d < distance
            distance[mask] = d[mask]
            farthest = torch.max(distance, -1)[1]
        rows = batch.view(-1, 1).repeat(1, 4)
        return x[rows, chosen, :], chosen


@forward(IMAGE, "target: B H W int", grids=((1, 1, 2, 1), (1, 1, 2, 2), (2, 1, 1, 2)))
class LovaszHinge(Conv):
    """Errors sorted over all pixels, the truth in their order, a gradient by cumulative sums."""

    def forward(self, x, target):
        y, truth = self.conv(x)[:, 0].reshape(-1), (target > 1).to(x.dtype).view(-1)
        errors, order = torch.sort(1.0 - y * (2.0 * truth - 1.0), dim=0, descending=True)
        truth = truth[order.data]
        union = truth.sum() + (1 - truth).cumsum(0)
        jaccard = 1.0 - (truth.sum() - truth.cumsum(0)) / union
        jaccard[1:] = jaccard[1:] - jaccard[:-1]
        return torch.dot(F.relu(errors), jaccard)


@forward(IMAGE, "target: B H W int", grids=((1, 1, 2, 1), (1, 1, 2, 2), (2, 1, 1, 2)))
class HardExamples(Conv):
    """OHEM: the loss of each pixel, sorted; those above a threshold, or a least number of them."""

    def forward(self, x, target):
        loss = F.cross_entropy(self.conv(x), target, reduction="none").view(-1)
        loss, _ = torch.sort(loss, descending=True)
        least = loss.numel() // 4
        hard = loss[loss > 1.2] if loss[least] > 1.2 else loss[:least]
        return hard.mean(), torch.mean(loss[: least * 2]), int(hard.numel())


@forward(IMAGE)
class ExitsEarly(Conv):
    """Samples that are certain keep their first answer; only the others go on."""

    def forward(self, x):
        y = self.conv(x)
        certain = y.softmax(1).amax(1).mean((1, 2)) > 0.42
        if certain.all():
            return y
        out = y.clone()
        out[~certain] = self.conv(y[~certain])
        return out, certain.sum().item()


@forward(TOKENS)
class MixtureOfExperts(nn.Module):
    """Tokens routed to their two best experts, by masks, and summed by ``index_add_``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        b, t, d = x.shape
        flat = x.view(-1, d)
        weights, chosen = torch.topk(F.softmax(self.gate(flat), dim=1), 2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros((b * t, d), dtype=x.dtype, device=x.device)
        mask = F.one_hot(chosen, num_classes=3).permute(2, 1, 0)
        for k, expert in enumerate(self.experts):
            place, rows = torch.where(mask[k])
            if rows.numel():
                found = expert(flat[None, rows].reshape(-1, d)) * weights[rows, place, None]
                out.index_add_(0, rows, found.to(x.dtype))
        return out.reshape(b, t, d)


@forward(TOKENS)
class PackedSequences(nn.Module):
    """Sequences of given lengths through a recurrent layer, packed and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 4, batch_first=True)

    def forward(self, x):
        lengths = [x.shape[1] - k % 2 for k in range(x.shape[0])]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        y, last = self.gru(packed)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0], last


@forward(TOKENS)
class PaddedSequences(nn.Module):
    """Pieces of unequal length by ``split`` with lists, padded by ``pad_sequence``, pooled."""

    def forward(self, x):
        t = x.shape[1]
        parts = x[0].split([2, 3, t - 5])
        padded = nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=-1.0)
        lengths = torch.tensor([len(p) for p in parts])
        mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
        mean = (padded * mask[..., None]).sum(1) / lengths.unsqueeze(1)
        return padded, mean, [p.amax(0) for p in parts], mask


@forward(IMAGE)
class CheckeredCoupling(Conv):
    """RealNVP: cells of a checkered mask change by a function of the others, and back."""

    def forward(self, x):
        h, w = x.shape[2:]
        mask = ((torch.arange(h)[:, None] + torch.arange(w)) % 2).to(x)[None, None]
        shift, scale = self.conv(x * mask).chunk(2, dim=1)
        shift, scale = torch.cat([shift] * 2, 1), torch.cat([scale.tanh()] * 2, 1)
        y = x * mask + (1 - mask) * (x * scale.exp() + shift)
        back = y * mask + (1 - mask) * (y - shift) * torch.exp(-scale)
        return y, back - x, ((1 - mask) * scale).sum(dim=(1, 2, 3))


@forward(SIGNAL)
class GreedyDecoding(nn.Module):
    """CTC: the best class a step, repetitions merged, blanks dropped, as lists of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 3, 3, padding=1)

    def forward(self, x):
        log = self.conv(x).log_softmax(1)
        texts = []
        for sample in log.argmax(1):
            merged = torch.unique_consecutive(sample)
            texts.append([k for k in merged.tolist() if k != 0])
        return log, texts, max(len(text) for text in texts)
