"""In-place changes: pieces, boundaries, canvases, shapes in place, and data."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hazards.entries import forward

IMAGE, TOKENS = "x: B C H W", "x: B T D"


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@forward(IMAGE)
class PiecesInPlace(Conv):
    """Pieces of a clone changed by ``narrow``, ``select``, steps and corners."""

    def forward(self, x):
        y = self.conv(x).clone()
        y.narrow(1, 0, 2).mul_(2.0)
        y.select(2, -1).zero_()
        y[:, :, ::2].add_(1.0)
        y[:, 1:3, 2:5, 3:].clamp_(min=0)
        y[..., -2:].copy_(x[..., :2])
        return y.sin()


@forward(IMAGE)
class SumsIntoSlices(Conv):
    """``y[...] += ...``, ``*=`` and ``-=`` with tensors, numbers and smaller shapes."""

    def forward(self, x):
        y = self.conv(x)
        y[:, :, 1:] += x[:, :, :-1]
        y[:, 1] *= x[:, 0].detach()
        y[..., ::2] -= y[..., ::2].mean().item()
        y[:, :2, 3] /= torch.tensor([2.0, 4.0], dtype=y.dtype).view(1, 2, 1)
        y[0] = 1 - y[0]
        return y * y


@forward(IMAGE)
class SwappedInPlace(Conv):
    """Channels and rows swapped by lists of indices and by tuple assignment."""

    def forward(self, x):
        y = self.conv(x)
        y[:, [0, 1]] = y[:, [1, 0]]
        y[:, 2], y[:, 3] = y[:, 3].clone(), y[:, 2].clone()
        y[:, :, 0], y[:, :, -1] = y[:, :, -1].clone(), y[:, :, 0].clone()
        y[:, :, [2, 5]] = y[:, :, [5, 2]] * 2
        return y.tanh()


@forward(IMAGE)
class BoundaryConditions(nn.Module):
    """Steps of the heat equation: periodic in one dim, no flux and a fixed value in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        u = x
        for _ in range(3):
            p = F.pad(u, (1, 1, 1, 1))
            p[..., 0], p[..., -1] = p[..., -2], p[..., 1]
            p[:, :, 0] = p[:, :, 1]
            p[:, :, -1] = 0.5
            neighbours = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
            u = u + self.rate * (neighbours - 4 * u)
        return u


@forward(IMAGE, H=10, W=12)
class SlidingWindows(Conv):
    """Overlapping tiles through a network, added into a canvas, divided by their count."""

    def forward(self, x):
        b, c, h, w = x.shape
        canvas, count = x.new_zeros(b, c, h, w), torch.zeros(1, 1, h, w, dtype=x.dtype)
        for i in sorted({*range(0, h - 6, 4), h - 6}):
            for j in sorted({*range(0, w - 6, 5), w - 6}):
                canvas[:, :, i : i + 6, j : j + 6] += self.conv(x[:, :, i : i + 6, j : j + 6])
                count[..., i : i + 6, j : j + 6] += 1
        return canvas / count


@forward(IMAGE)
class PastedOnACanvas(Conv):
    """An image pasted into a larger canvas, a frame of parameters around it, quadrants."""

    def __init__(self) -> None:
        super().__init__()
        self.fill = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x):
        b, c, h, w = x.shape
        canvas = self.fill.expand(b, c, h + 4, w + 6).clone()
        canvas[:, :, 2 : 2 + h, 3 : 3 + w] = self.conv(x)
        big = torch.empty(b, c, 2 * h, 2 * w, dtype=x.dtype)
        big[:, :, :h, :w], big[:, :, :h, w:] = x, x.flip(3)
        big[:, :, h:] = big[:, :, :h].flip(2)
        return canvas, big


@forward(TOKENS)
class FilledStepByStep(nn.Module):
    """Outputs of a loop written into a tensor made before it, and a memory that is read back."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 8)

    def forward(self, x):
        b, t, d = x.shape
        out, h = torch.zeros(t, b, d, dtype=x.dtype, device=x.device), x.new_zeros(b, d)
        for i, step in enumerate(x.transpose(0, 1)):
            h = torch.tanh(self.cell(torch.cat([step, h if i < 2 else out[i - 2]], -1)))
            out[i] = h
        return out.transpose(0, 1), h


@forward(IMAGE)
class PatchesByLoops(Conv):
    """im2col by loops over the kernel, written into one tensor, then one product."""

    def forward(self, x):
        b, c, h, w = x.shape
        oh, ow = (h - 3) // 2 + 1, (w - 3) // 2 + 1
        columns = torch.zeros(b, c, 3, 3, oh, ow, dtype=x.dtype)
        for i in range(3):
            for j in range(3):
                columns[:, :, i, j] = x[:, :, i : i + 2 * oh : 2, j : j + 2 * ow : 2][
                    :, :, :oh, :ow
                ]
        columns = columns.permute(0, 4, 5, 1, 2, 3).reshape(b * oh * ow, -1)
        y = columns @ self.conv.weight.view(4, -1).T + self.conv.bias
        return y.view(b, oh, ow, -1).permute(0, 3, 1, 2)


@forward(IMAGE)
class DetachedInPlace(Conv):
    """``y.detach()`` and ``y.data`` share the cells: what is written there is in ``y``."""

    def forward(self, x):
        y = self.conv(x) * 2
        y.detach()[:, 1].zero_()
        y.data.clamp_(-1.0, 1.0)
        y.data[:, :, 0] = 0.25
        return y


@forward(IMAGE)
class ShapesInPlace(Conv):
    """``unsqueeze_``, ``squeeze_``, ``transpose_``, ``t_`` and ``swapaxes_``."""

    def forward(self, x):
        y = self.conv(x)
        z = y.mean(1).unsqueeze_(1)
        z.squeeze_(1)
        w = y.clone().transpose_(2, 3)
        return z, w, y.mean((0, 1)).t_() + 1


@forward(IMAGE)
class OutIntoSlices(Conv):
    """``out=`` a slice of a tensor made before."""

    def forward(self, x):
        y = self.conv(x).detach()
        both = torch.zeros(*y.shape, dtype=y.dtype)
        torch.sin(y[:, :2], out=both[:, :2])
        torch.mul(y[:, 2:], 2.0, out=both[:, 2:])
        return both + x


@forward(IMAGE)
class MethodsInPlace(Conv):
    """``lerp_``, ``addcmul_``, ``masked_fill_``, ``index_add_``, ``scatter_`` and others."""

    def forward(self, x):
        y = self.conv(x)
        index = torch.tensor([1, 4])
        y.lerp_(x, 0.3).addcmul_(x, x, value=0.1).addcdiv_(x, x.abs() + 1)
        y.masked_fill_(x > 1, 0.0).index_fill_(2, torch.tensor([0]), 2.0)
        y.index_add_(2, index, x[:, :, 2:4], alpha=2).index_copy_(3, index, x[..., 5:7])
        y.scatter_(1, x.argmax(1, keepdim=True), -1.0).div_(2).neg_()
        return y.pow_(2), y.sub_(x.mean()).round(decimals=2)


@forward(IMAGE)
class ListsOfRows(Conv):
    """Rows in a list, some replaced, some deleted, some inserted; columns by a comprehension."""

    def forward(self, x):
        rows = list(self.conv(x).unbind(2))
        rows[0] = rows[0] * 2
        rows.insert(1, rows[-1].sin())
        del rows[3]
        rows[2:4] = [rows[3], rows[2]]
        y = torch.stack(rows, dim=2)
        return y, torch.stack([c / (k + 1) for k, c in enumerate(y.unbind(-1)) if k % 3], -1)
