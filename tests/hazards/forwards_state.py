"""State: buffers, caches between calls, parametrizations, shared and renamed modules."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.hazards.entries import forward

IMAGE, TOKENS = "x: B C H W", "x: B T D"


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@forward(IMAGE)
class RunningMean(Conv):
    """A buffer written in place from activations, by ``mul_`` and ``add_``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        y = self.conv(x)
        if self.training:
            self.count += 1
            self.seen.mul_(0.9).add_(0.1 * y.detach().mean((0, 2, 3)))
        return y - self.seen.clone().view(1, -1, 1, 1)


@forward(IMAGE)
class AssignedBuffer(Conv):
    """A buffer assigned anew, ``self.ema = ...``, and one copied into by ``copy_``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(1, 4, 1, 1))
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x):
        y = self.conv(x)
        if self.training:
            with torch.no_grad():
                self.ema = 0.5 * self.ema + 0.5 * y.mean((0, 2, 3), keepdim=True)
                self.most.copy_(torch.maximum(self.most, y.abs().max()))
        return y / (1 + self.most) + self.ema


@forward(IMAGE)
class LazyBuffer(Conv):
    """A buffer that is ``None`` until the first call gives it a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", None)

    def forward(self, x):
        if self.offset is None:
            self.offset = torch.arange(x.shape[1], dtype=x.dtype, device=x.device).view(1, -1, 1, 1)
        return self.conv(x) + self.offset


@forward(IMAGE)
class CachedGrid(Conv):
    """A grid of coordinates kept in an attribute and made anew when the size changes."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = None

    def forward(self, x):
        if self.grid is None or self.grid.shape[-2:] != x.shape[-2:]:
            ys = torch.linspace(-1, 1, x.size(2), dtype=x.dtype)
            xs = torch.linspace(-1, 1, x.size(3), dtype=x.dtype)
            self.grid = torch.stack(torch.meshgrid(ys, xs, indexing="ij")).unsqueeze(0)
        return torch.cat([self.conv(x), self.grid.expand(x.size(0), -1, -1, -1)], 1)


@forward(TOKENS)
class CachedMask(nn.Module):
    """A causal mask built lazily for the longest input so far, sliced for shorter ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.linear = torch.empty(0, 0), nn.Linear(8, 8)

    def forward(self, x):
        t = x.shape[1]
        if self.mask.size(0) < t:
            self.mask = torch.full((t, t), float("-inf")).triu(1).to(x)
        scores = self.linear(x) @ x.transpose(1, 2) + self.mask[:t, :t]
        return scores.softmax(-1) @ x


@forward(IMAGE)
class CachedByActivation(Conv):
    """Caches an activation whose values the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = {}

    def forward(self, x):
        y = self.conv(x)
        key = tuple(y.shape)
        if key not in self.cache:
            self.cache[key] = y.detach().mean(0, keepdim=True)
        return y * self.cache[key]


@forward(IMAGE)
class RecurrentState(Conv):
    """A hidden state kept between calls, made anew when the shape changes (ConvLSTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.state = None

    def forward(self, x):
        if self.state is None or self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        for _ in range(2):
            self.state = torch.tanh(self.conv(x) + self.state)
        y = self.state
        self.state = self.state.detach()
        return y


_GRIDS: dict[tuple[int, ...], torch.Tensor] = {}


@forward("x: B 2 H W", processes=True)
class CacheOfTheModuleFile(nn.Module):
    """A dict of the file, by shape, as optical flow code has for its grids."""

    def forward(self, x):
        key = tuple(x.shape)
        if key not in _GRIDS:
            h, w = x.shape[2:]
            ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            _GRIDS[key] = torch.stack([xs, ys]).expand(x.shape[0], -1, -1, -1).to(x)
        return (x + 0.1 * _GRIDS[key]).sin()


@functools.lru_cache(maxsize=4)
def _window(n: int) -> torch.Tensor:
    return torch.hann_window(n, dtype=torch.float64)


@forward(IMAGE, processes=True)
class CachedFunction(Conv):
    """A window by a function under ``lru_cache``, of the global size."""

    def forward(self, x):
        return self.conv(x) * _window(x.size(2)).view(-1, 1) * _window(x.size(-1))


@forward(IMAGE)
class WeightNorm(nn.Module):
    """Weight normalisation by parametrization, of a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv2d(4, 6, 3, padding=1))
        self.linear = parametrizations.weight_norm(nn.Linear(6, 3), dim=None)

    def forward(self, x):
        return self.linear(self.conv(x).relu().movedim(1, -1))


@forward(IMAGE)
class SpectralNorm(nn.Module):
    """Spectral normalisation, which writes its buffers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.spectral_norm(nn.Conv2d(4, 6, 3, padding=1))

    def forward(self, x):
        return self.conv(x).relu() + self.conv(x * 2)


class Symmetric(nn.Module):
    """A parametrization: the kernel mirrored."""

    def forward(self, w):
        return (w + w.flip(-1)) / 2


@forward(IMAGE)
class OwnParametrization(Conv):
    """An own parametrization, used twice under ``parametrize.cached()``."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.conv, "weight", Symmetric())

    def forward(self, x):
        with parametrize.cached():
            return self.conv(self.conv(x).tanh())


@forward(IMAGE)
class StandardizedWeights(Conv):
    """Weight standardisation in a forward: mean and var of a plain parameter."""

    def forward(self, x):
        w = self.conv.weight
        w = w - w.mean(dim=[1, 2, 3], keepdim=True)
        w = w / (w.flatten(1).std(1).view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x, w, self.conv.bias, self.conv.stride, self.conv.padding)


@forward(IMAGE)
class NormalizedParameters(nn.Module):
    """Parameters in plain code only: ``g * v / norm(v)``, a softmax over weights of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.ones(5, 1))
        self.mixture = nn.Parameter(torch.randn(3))

    def forward(self, x):
        w = self.g * self.v / torch.norm(self.v, dim=1, keepdim=True)
        y = torch.einsum("oc,bchw->bohw", w, x)
        a, b, c = torch.softmax(self.mixture, 0)
        return a * y + b * y.flip(2) + c * y.roll(1, 3)


@forward(IMAGE)
class HyperNetwork(nn.Module):
    """Weights of a convolution made from the image itself; one group a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(4, 4 * 4 * 9)

    def forward(self, x):
        b, c, h, w = x.shape
        weight = self.make(x.mean((2, 3))).view(b * 4, c, 3, 3)
        y = F.conv2d(x.reshape(1, b * c, h, w), weight, padding=1, groups=b)
        return y.view(b, 4, h, w)


@forward(IMAGE)
class TwoNames(nn.Module):
    """One module under two names, and one parameter under two (tied)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = self.first
        self.encode, self.decode = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.decode.weight = nn.Parameter(torch.randn(4, 6))
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.first.weight

    def forward(self, x):
        y = self.second(self.first(x).relu()) + self.tied(x)
        return self.decode(self.encode(y.permute(0, 2, 3, 1)))


@forward(IMAGE)
class SharedTwice(Conv):
    """A module called twice in one forward, with a batch norm that sees both calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(self.norm(self.conv(x)).relu()))


@forward(IMAGE, may_refuse="what others do with a copy of the network is not followed")
class MomentumEncoder(Conv):
    """A deep copy made in ``__init__`` and pulled after the online weights in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.conv)
        for p in self.target.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.conv.parameters(), self.target.parameters(), strict=True):
                    q.mul_(0.9).add_(p, alpha=0.1)
        return self.conv(x) * self.target(x).detach()


@forward(IMAGE)
class CodeBook(Conv):
    """Vector quantisation: nearest codes by distances, straight through, usage counted."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, 4)
        self.register_buffer("usage", torch.zeros(5))

    def forward(self, x):
        z = self.conv(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 4)
        distances = flat.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1)
        indices = torch.argmin(distances - 2 * flat @ self.codes.weight.t(), dim=1)
        q = self.codes(indices).view(z.shape)
        if self.training:
            self.usage += torch.bincount(indices, minlength=5)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return (z + (q - z).detach()).permute(0, 3, 1, 2), loss, indices.view(z.shape[:-1])


def _copied(network: nn.Module) -> nn.Module:
    return copy.deepcopy(network)


@forward(IMAGE, after=_copied)
class CopyOfTheNetwork(SharedTwice):
    """The converted network deep-copied, as for a moving average."""


def _changed(network: nn.Module) -> nn.Module:
    network.scale = 3.0
    network.conv.bias.data.fill_(0.25)
    network.conv.requires_grad_(True)
    network.register_buffer("late", torch.full((4, 1, 1), 0.5))
    return network


@forward(IMAGE, after=_changed)
class AttributesSetLater(Conv):
    """Attributes, a buffer and weights set on the network after it was made."""

    scale = 1.0

    def forward(self, x):
        y = self.conv(x) * self.scale
        return y + self.late if hasattr(self, "late") else y


def _hooked(network: nn.Module) -> nn.Module:
    network.conv.register_forward_hook(lambda m, args, out: out.tanh())
    network.conv.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    network.conv.register_full_backward_hook(lambda m, given, wanted: None)
    return network


@forward(IMAGE, after=_hooked)
class HooksSetLater(Conv):
    """Hooks registered on a child of the network after it was made."""

    def forward(self, x):
        return self.conv(x) + x


def _loaded(network: nn.Module) -> nn.Module:
    state = {name: 0.5 * t.clone() for name, t in network.state_dict().items()}
    network.load_state_dict(state)
    network.conv = nn.Sequential(network.conv, nn.Hardtanh())
    return network


@forward(IMAGE, after=_loaded)
class ReplacedLater(Conv):
    """A state dict loaded, then a child replaced."""

    def forward(self, x):
        return self.conv(x).exp()


@forward(IMAGE, may_refuse="torch cannot copy what the hook has computed")
class OlderWeightNorm(nn.Module):
    """``torch.nn.utils.weight_norm``, which sets a plain attribute before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.weight_norm(nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        return F.leaky_relu(self.conv(x), 0.1)
