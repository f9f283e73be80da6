"""One function in its many spellings: keywords, aliases, sizes of numpy, negative dims."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import operator

import numpy as np
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
class KeywordsOutOfOrder(Conv):
    """Every argument by keyword, none in order."""

    def forward(self, x):
        y = F.conv2d(padding=1, weight=self.conv.weight, bias=None, input=x)
        y = F.interpolate(mode="bilinear", size=(9, 7), align_corners=False, input=y)
        z = F.pad(mode="reflect", pad=(1, 1, 2, 0), input=y)
        z = torch.cat(dim=1, tensors=[z, F.layer_norm(normalized_shape=z.shape[3:], input=z)])
        z = F.max_pool2d(stride=1, kernel_size=3, padding=1, input=z)
        u = torch.sum(keepdim=True, dim=(2, 3), input=z) + torch.mean(dim=3, input=z).unsqueeze(3)
        return z, u, F.softmax(dim=2, input=z), torch.where(other=y, input=-y, condition=y > 0)


@forward(IMAGE)
class KeywordsOfNumpy(Conv):
    """``axis=`` and ``keepdims=``, which torch takes as well, and ``concatenate``."""

    def forward(self, x):
        y = self.conv(x)
        a = y.mean(axis=(2, 3), keepdims=True) + torch.sum(y, axis=2, keepdims=True)
        b = torch.concatenate([y, a.expand_as(y)], axis=1).max(axis=2).values
        return a, b, y.std(axis=3), torch.concat((y, y), axis=-1), y.softmax(axis=1)


@forward(IMAGE)
class SizesOfNumpy(Conv):
    """numpy's integers and floats as sizes, dims, indices, strides and factors."""

    def forward(self, x):
        half = np.asarray(x.shape[2:]) // 2
        y = self.conv(x) * np.float32(0.5) + np.float64(2) * x
        a = F.adaptive_avg_pool2d(y, tuple(half)) + F.interpolate(y, size=[*half])
        b = y.reshape(np.int64(x.shape[0]), -1, np.prod(half[:0], dtype=int), y.shape[-1])
        c = y[:, :, half[0] :, : np.int32(3)].sum(np.int64(2)) / np.sqrt(half[1])
        d = torch.zeros(np.ceil(half / 2).astype(int).tolist()) + y.roll(np.int64(1), 2).mean()
        for k in np.arange(2):
            d = d + y[:, int(k)].sum() * k
        return a, b, c, d


@forward(IMAGE)
class NegativeDims(Conv):
    """Dims counted from the end, in everything that takes one."""

    def forward(self, x):
        y = self.conv(x)
        a = torch.cat([y, y.flip(-2)], dim=-3).softmax(-3).transpose(-1, -3).squeeze(-4)
        b = y.unsqueeze(-2).sum(-1).cumsum(-3).select(-1, -1)
        c, *_ = y.roll(2, dims=-1).split(4, dim=-2)
        d = torch.stack([c, -c], dim=-1).flatten(-3, -2).movedim(-2, -4)
        e = y.narrow(-2, -5, 4).unflatten(-2, (2, -1)).amax((-1, -4))
        return (
            a,
            b,
            d,
            e,
            y.gather(-1, y.argsort(-1)[..., -3:]),
            y.index_select(-2, y.new_ones(2).long()),
        )


@forward(IMAGE)
class EllipsisEverywhere(Conv):
    """``...`` before, between and behind indices, lists, masks and new dims; on both sides."""

    def forward(self, x):
        y = self.conv(x)
        out = torch.zeros_like(y)
        out[..., 1:] = y[..., :-1]
        out[:, ..., 0] = y[:, ..., -1]
        out[0, ..., ::2, :] += 1.0
        a = y[None, ..., 1:, ::3], y[..., None, :, [0, 2]], y[-1, ..., 0], y[..., 2, :][..., None]
        keep = torch.arange(y.shape[-1]) % 3 == 0
        return out, a, y[..., keep], y[(slice(None),) * 2 + (3,)], y[(..., slice(1, None, 4))]


@forward(IMAGE)
class IndicesThatAreTensors(Conv):
    """0-dim tensors as indices, bounds of slices, sizes, and in ``range``."""

    def forward(self, x):
        y = self.conv(x)
        n = torch.tensor(3)
        at = y.detach().mean((0, 1, 3)).argmax()
        a = y[:, :, n] + y[:, :, at] + y.select(2, int(at)) + y[:, :, at.item()]
        b = y[:, :, : n + 1], y[..., n:], y.narrow(3, n, 2), y[:, torch.tensor(1)]
        return a, b, sum(y[:, :, i].sum() for i in range(n)), torch.zeros(n, n + 1) + y.mean()


@forward(IMAGE)
class SizesInEveryForm(Conv):
    """Sizes as starred tuples, sums of shapes, ``numel`` of a part, and other tensors' sizes."""

    def forward(self, x):
        y = self.conv(x)
        b, c = y.shape[:2]
        flat = y.view(y.shape[:2] + torch.Size([-1])) * y.size()[2:].numel()
        back = flat.view(*y.shape[:2], *y.shape[2:]).reshape((b, c, *tuple(y.shape)[2:]))
        ones = torch.ones(*y.shape[-2:], dtype=y.dtype) + y.new_empty(y.shape[2:]).fill_(0.5)
        wide = y.mean((0, 1)).expand(b, *back.shape[1:]) + y.mean(1, True).expand_as(y)
        same = y.reshape_as(flat).view_as(y) if y.shape.numel() == flat.numel() else None
        return flat, back * ones, wide, same, y.sum_to_size(1, c, 1, 1), [*y.shape, y.shape[-1:]]


@forward(IMAGE)
class FunctionsOfOperators(Conv):
    """``operator.add``, unbound methods of ``torch.Tensor``, ``map`` and dunder methods."""

    def forward(self, x):
        y = self.conv(x)
        a = operator.add(x, y) * operator.neg(y) - operator.truediv(x, operator.pow(y, 2) + 1)
        b = torch.Tensor.mul(x, 2) + torch.Tensor.__add__(y, 1) + x.__rsub__(3)
        c, d = map(torch.sin, (x, y))
        e = operator.matmul(x, y.mT) + torch.Tensor.sum(x, dim=(0, 1)).sum(1)[:, None]
        f = operator.getitem(y, (slice(None), 1)) if operator.gt(y.amax(), -9) else None
        b += 1
        return a, operator.iadd(b, c), d, e, f, operator.invert(y > 0), operator.and_(y > 0, x > 0)


@forward(IMAGE)
class AliasesOfFunctions(Conv):
    """``clip``, ``multiply``, ``true_divide``, ``arctan``, ``moveaxis``, ``greater`` and others."""

    def forward(self, x):
        y = self.conv(x)
        a = torch.clip(y, min=-0.5, max=0.5) + torch.multiply(x, y) - torch.subtract(y, x, alpha=2)
        b = torch.true_divide(torch.absolute(y), torch.negative(torch.square(x) + 1)).arctan()
        c = torch.moveaxis(torch.swapdims(y, 1, 2), 0, -1) + torch.fix(y.movedim(0, 3).mT.mean())
        d = torch.greater(y, x) | torch.less_equal(x, 0), torch.not_equal(y.sign(), torch.sgn(y))
        e = torch.arcsinh(y) + torch.float_power(y.abs() + 1, 0.5) + torch.special.exp2(y) + y.erf()
        return (
            a,
            b,
            c,
            d,
            e,
            torch.ravel(y[0]),
            y.relu().xlogy(y.abs() + 1),
            torch.clamp_max(y, 0.1),
        )


@forward(IMAGE, "target: B H W int", grids=((1, 1, 2, 1), (1, 1, 2, 2), (2, 1, 1, 2)))
class LossesOfClasses(Conv):
    """``nll_loss``, ``cross_entropy`` with smoothing, ignored classes and weights; focal, dice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.5, 1.0, 2.0, 1.5]))

    def forward(self, x, target):
        y = self.conv(x)
        log = F.log_softmax(y, dim=1)
        picked = log.gather(1, target.unsqueeze(1)).squeeze(1)
        focal = -((1 - picked.exp()) ** 2) * picked * self.weights[target]
        masks = torch.stack([target == k for k in range(4)], 1).to(y.dtype)
        return {
            "nll": F.nll_loss(log, target, ignore_index=3), "focal": focal.mean(),
            "ce": F.cross_entropy(y, target, weight=self.weights, label_smoothing=0.1),
            "each": F.cross_entropy(y, target, reduction="none").flatten(1).mean(1),
            "dice": 1 - (2 * (y.softmax(1) * masks).sum((0, 2, 3)) / masks.sum((0, 2, 3))).mean(),
            "accuracy": (y.argmax(1) == target).double().mean(),
        }  # fmt: skip


@forward(IMAGE)
class AskedOfTensors(Conv):
    """Questions to a tensor: layout, contiguity, device, size of an element, kind of dtype."""

    def forward(self, x):
        y = self.conv(x)
        if y.is_cuda or y.is_sparse or y.is_quantized or y.layout is not torch.strided:
            return None
        y = y if y.is_contiguous() else y.contiguous()
        y = y.type(torch.float64) * (2 if y.device.type == "cpu" and y.get_device() < 0 else 3)
        size = y.element_size(), y.itemsize, y.dim(), y.ndimension(), y.nelement(), y.is_complex()
        return y / torch.finfo(y.dtype).bits, size, y.dtype.is_floating_point, y.is_inference()


@forward(IMAGE)
class ComparedWhole(Conv):
    """``equal``, ``allclose``, ``isclose``, ``is_nonzero`` and ``assert`` on values."""

    def forward(self, x):
        y = self.conv(x)
        assert torch.isfinite(y).all() and not torch.isnan(y).any(), "not finite"
        assert y.shape == x.shape and y.abs().max() < 1e6, f"{y.abs().max()} is too large"
        same = torch.equal(y, y.clone()), torch.allclose(y, y + 1e-12), torch.allclose(y, x)
        if torch.is_nonzero(y.abs().sum()) and not torch.equal(y, y * 2):
            y = y * torch.isclose(y, y.round(), atol=0.2)
        if not (y == y).all():
            raise ValueError("a cell is not a number")
        return y, same, bool(torch.any(y > 9))


@forward(IMAGE)
class FactoriesByKeyword(Conv):
    """Tensors made in a forward by sizes, lists, numpy, ranges and others' dtypes."""

    def forward(self, x):
        y = self.conv(x)
        h, w = y.shape[-2:]
        a = torch.full(size=(h, 1), fill_value=0.5) + torch.eye(n=h, m=w, dtype=y.dtype)
        b = torch.as_tensor(np.linspace(0, 1, w)) + torch.logspace(start=0, end=1, steps=w)
        c = (
            torch.scalar_tensor(2.0)
            * torch.tensor(y.detach().mean((0, 2, 3)).tolist())[:, None, None]
        )
        d = torch.tensor([[float(k) for k in range(w)]], device=y.device).type_as(y)
        i, j = torch.tril_indices(h, w)
        mask = torch.zeros_like(a, dtype=torch.bool)
        mask[i, j] = True
        e = torch.tensor(np.hanning(h)[:, None]) + torch.empty_like(y[:, :1]).copy_(
            y[:, :1].detach()
        )
        return y * a + b, c + y, d - y, y.masked_fill(mask, 0.0), e * y


@forward(IMAGE)
class BitsOfAnotherDtype(Conv):
    """``view(dtype)``: the cells' bits, and twice as many cells of half the size."""

    def forward(self, x):
        y = self.conv(x).detach()
        signs = (y.view(torch.int64) < 0).to(y.dtype)
        return signs + y, y.float().view(torch.int32).bitwise_and(255)


@forward(IMAGE)
class ConversionsOfDtype(Conv):
    """Promotion of integers and booleans, ``to`` with options, ``result_type``, ``bfloat16``."""

    def forward(self, x):
        y = self.conv(x)
        low = y.bfloat16().to(torch.float64, copy=True) + y.half().double()
        counts = (y > 0).sum((2, 3)) / 7 + (y * 4).int().float().sum((2, 3)) // 3
        both = torch.result_type(y, 1), torch.promote_types(torch.int32, torch.float16)
        z = (y > 0) * y + (y < 0).int() * 2 - (y.long() ^ 3) % 2
        return (
            low,
            counts,
            both,
            z.to(y, non_blocking=True),
            y.to(dtype=torch.float32).dtype,
            z.byte(),
        )
