"""Views, slices, windows and in-place changes."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE = "x: B C H W"


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@forward(IMAGE, may_refuse="a view that had to be moved is changed in place")
class InPlaceOnRows(Conv):
    """A slice of rows changed in place, which the whole tensor must show."""

    def forward(self, x):
        y = self.conv(x).clone()
        y[:, :, 1:].add_(1.0)
        top = y[:, :, :3]
        top.mul_(2.0)
        return y


@forward(IMAGE)
class InPlaceOnChannels(Conv):
    """A slice of channels changed in place: the same on blocks."""

    def forward(self, x):
        y = self.conv(x)
        first = y[:, :2]
        first.add_(1.0).mul_(0.5)
        y[:, 3].zero_()
        return y


@forward(IMAGE, may_refuse="a view that had to be moved is changed in place")
class InPlaceOnFlattened(Conv):
    """A flattened view changed in place."""

    def forward(self, x):
        y = self.conv(x).clone()
        flat = y.view(y.size(0), -1)
        flat += torch.arange(flat.size(1), dtype=y.dtype, device=y.device)
        return y * 2


@forward(IMAGE, may_refuse="a view that had to be moved is changed in place")
class InPlaceOnFlattenedSlice(Conv):
    """Cells of a flattened view written, then the image read."""

    def forward(self, x):
        y = self.conv(x).clone()
        y.flatten(2)[:, :, 5:20] = 0.0
        y.view(-1)[::7].mul_(3.0)
        return y.sin()


@forward(IMAGE, may_refuse="a view that had to be moved is changed in place")
class InPlaceOnPermuted(Conv):
    """Permuted, transposed and unsqueezed views changed in place."""

    def forward(self, x):
        y = self.conv(x).clone()
        y.permute(0, 2, 3, 1)[..., 0].mul_(2.0)
        y.transpose(2, 3).add_(0.5)
        y.unsqueeze(1).sub_(0.25)
        return y


@forward(IMAGE, may_refuse="a view that had to be moved is changed in place")
class InPlaceOnPieces(Conv):
    """Pieces along spatial dims changed in place, one by one, by narrow and select."""

    def forward(self, x):
        y = self.conv(x).clone()
        for i in range(3):
            y.narrow(2, 3 * i, 3).mul_(i + 1.0)
        for i in range(y.size(3)):
            y.select(3, i).add_(0.1 * i)
        return y


@forward(IMAGE)
class WrittenBySlices(Conv):
    """An output made by ``zeros`` and filled slice by slice, rows and columns, with a step."""

    def forward(self, x):
        y = self.conv(x)
        b, c, h, w = y.shape
        out = torch.zeros(b, c, h, w, dtype=y.dtype, device=y.device)
        out[:, :, : h // 2] = y[:, :, h - h // 2 :]
        out[:, :, h // 2 :, ::2] = y[:, :, h // 2 :, ::2] * 2
        out[:, 0, 0, 0] = 1.0
        return out


@forward(IMAGE)
class WrittenToWholeChannels(Conv):
    """``zeros_like``, then channels written: temporal shift of TSM."""

    def forward(self, x):
        out = torch.zeros_like(x)
        out[:-1, :1] = x[1:, :1]
        out[1:, 1:2] = x[:-1, 1:2]
        out[:, 2:] = x[:, 2:]
        return self.conv(out)


@forward(IMAGE)
class ShiftOfRows(Conv):
    """Each row from its neighbour by slices of both sides, as finite differences are written."""

    def forward(self, x):
        u = self.conv(x)
        out = u.clone()
        out[:, :, 1:-1, 1:-1] = (
            u[:, :, 2:, 1:-1] + u[:, :, :-2, 1:-1] + u[:, :, 1:-1, 2:] + u[:, :, 1:-1, :-2]
        ) / 4
        return out


@forward(IMAGE)
class TotalVariation(Conv):
    """Differences of neighbours, which have a row less; a number and a map."""

    def forward(self, x):
        y = self.conv(x)
        dy = y[:, :, 1:, :] - y[:, :, :-1, :]
        dx = torch.diff(y, dim=3)
        return dy.abs().mean() + dx.square().sum(), dy


@forward(IMAGE)
class InPlaceActivations(Conv):
    """``F.relu(x, inplace=True)`` on what is used again, and methods with an underscore."""

    def forward(self, x):
        y = self.conv(x)
        F.relu(y, inplace=True)
        z = y * 2
        F.leaky_relu_(z, 0.2)
        w = (z - 1).clamp_(-0.5, 0.5)
        return y + w.sigmoid_(), z


@forward(IMAGE, may_refuse="a view that had to be moved is changed in place")
class InPlaceOnFlattenedRelu(nn.Module):
    """``F.relu(x.flatten(1), inplace=True)`` and the tensor that it is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x).clone()
        z = F.relu(y.flatten(2), inplace=True)
        return y.sum((2, 3)) + z.mean(2)


@forward(IMAGE, step=4, H=8, W=12)
class SwinWindows(nn.Module):
    """Window partition and reverse as Swin writes it, with a cyclic shift by ``roll``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        s = 4
        x = torch.roll(x, shifts=(-2, -2), dims=(1, 2))
        t = x.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).contiguous()
        t = t.view(-1, s * s, c)
        t = t + torch.softmax(t @ t.transpose(-2, -1), dim=-1) @ self.mix(t)
        t = t.view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).contiguous()
        x = torch.roll(t.view(b, h, w, c), shifts=(2, 2), dims=(1, 2))
        return x.permute(0, 3, 1, 2)


@forward(IMAGE, H=11, W=9, step=3)
class PaddedWindows(nn.Module):
    """Windows of a size that does not divide the image: padded first, cropped after."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        _, _, h, w = x.shape
        x = F.pad(x, (0, -w % 4, 0, -h % 4))
        b, c, hp, wp = x.shape
        t = x.reshape(b, c, hp // 4, 4, wp // 4, 4).permute(0, 2, 4, 1, 3, 5)
        t = self.mix(t.reshape(b, -1, c, 16))
        t = t.reshape(b, hp // 4, wp // 4, c, 4, 4).permute(0, 3, 1, 4, 2, 5)
        return t.reshape(b, c, hp, wp)[:, :, :h, :w]


@forward(IMAGE, step=2)
class PatchMerging(nn.Module):
    """Four neighbours become features of one, then norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x0, x1 = x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :]
        x2, x3 = x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]
        x = torch.cat([x0, x1, x2, x3], -1)
        return self.reduce(self.norm(x.view(x.shape[0], -1, 16)))


@forward(IMAGE, step=2)
class GridPartition(nn.Module):
    """MaxViT's grid: pixels far apart share an attention."""

    def forward(self, x):
        b, c, h, w = x.shape
        t = x.view(b, c, 2, h // 2, 2, w // 2).permute(0, 3, 5, 2, 4, 1).reshape(-1, 4, c)
        t = F.scaled_dot_product_attention(t, t, t)
        t = t.view(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 3, 1, 4, 2)
        return t.reshape(b, c, h, w)


@forward(IMAGE)
class FlattenAndBack(nn.Module):
    """Image to tokens and back, by flatten, transpose and unflatten."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        size = x.shape[2:]
        t = x.flatten(2).transpose(1, 2)
        t = t + self.mix(self.norm(t))
        return t.transpose(1, 2).unflatten(2, size)


@forward(IMAGE)
class FourViewsAveraged(Conv):
    """Test-time augmentation in the forward: flips in, flips back, the mean."""

    def forward(self, x):
        found = [self.conv(x)]
        for dims in ((2,), (3,), (2, 3)):
            found.append(torch.flip(self.conv(torch.flip(x, dims)), dims))
        return torch.stack(found).mean(0)


@forward(IMAGE)
class CornersAndEdges(Conv):
    """Single cells, negative indices, ``None`` and an ellipsis."""

    def forward(self, x):
        y = self.conv(x)
        return y[0, 0, 3, -1], y[..., -1], y[:, :, -2:, :1], y[:, None, 1], y[-1].select(1, 2)


@forward(IMAGE, may_refuse="strides are those of a block")
class AsStrided(Conv):
    """Overlapping windows by ``as_strided``, which speaks of memory."""

    def forward(self, x):
        y = self.conv(x).contiguous()
        b, c, h, w = y.shape
        sb, sc, sh, sw = y.stride()
        return y.as_strided((b, c, h - 2, w, 3), (sb, sc, sh, sw, sh)).sum(-1)


@forward(IMAGE)
class UnfoldMethod(Conv):
    """``Tensor.unfold``: sliding windows as a new dim."""

    def forward(self, x):
        y = self.conv(x)
        rows = y.unfold(2, 3, 2)
        return rows.mean(-1), y.unfold(3, 4, 1).unfold(2, 2, 2).amax((-1, -2))


@forward(IMAGE, step=2)
class EinopsLike(nn.Module):
    """``b c (h p) (w q) -> b (h w) (p q c)`` and reductions over one of the new dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 8)

    def forward(self, x):
        b, c, h, w = x.shape
        t = x.reshape(b, c, h // 2, 2, w // 2, 2)
        tokens = t.permute(0, 2, 4, 3, 5, 1).reshape(b, (h // 2) * (w // 2), 4 * c)
        pooled = t.amax(dim=(3, 5))
        return self.embed(tokens), pooled, t.movedim(5, 1).mean(dim=(1, 4))


@forward(IMAGE)
class TakesOutArgument(Conv):
    """``out=`` of functions, into what was made before."""

    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            scale = torch.empty_like(y)
            torch.add(y, 1.0, out=scale)
            whole = torch.empty(y.shape, dtype=y.dtype, device=y.device)
            torch.mul(y, scale, out=whole)
        return y * scale, whole


@forward(IMAGE)
class AugmentedAssignments(Conv):
    """``+=`` on an input's clone, on attributes and on list items."""

    def forward(self, x):
        found = [x.clone(), x * 2]
        found[0] += self.conv(x)
        found[1] *= found[0]
        found[1][:, 1] += 1.0
        found[1] **= 2
        found[1] /= 3.0
        return found


@forward(IMAGE, may_refuse="resize_ and set_ speak of memory")
class DataAttribute(Conv):
    """``.data`` read and assigned, which autograd does not see."""

    def forward(self, x):
        y = self.conv(x)
        z = y.data * 2
        y.data = y.data + 1.0
        return y * z


@forward("x: 1 2 15 23", step=0, grids=((1, 1, 2, 2), (1, 1, 1, 4)))
class ColumnOfTokens(nn.Module):
    """A column of tokens that all axes split is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(23, 23)

    def forward(self, x):
        y = self.linear(self.linear(x).tanh()).flatten(0, -2).clone()
        y[:, 6] += 1
        return y


@forward(IMAGE)
class Squeezes(Conv):
    """Dims of one cell: squeezed, unsqueezed, squeezed all at once."""

    def forward(self, x):
        y = self.conv(x)
        a = F.adaptive_avg_pool2d(y, 1).squeeze(-1).squeeze(-1)
        b = y.narrow(2, 4, 1).squeeze(2)
        c = y[:, :, 2:3].squeeze().unsqueeze(2)
        return a, b, c, torch.squeeze(y.sum(3, keepdim=True), (3,))
