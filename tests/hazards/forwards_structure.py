"""Structure of forwards: arguments, outputs, containers, control flow, type tests."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

import collections
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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


@dataclass
class Found:
    """An output as libraries of transformers have it."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None
    size: int = 0


class Pair(NamedTuple):
    """An output with names."""

    mean: torch.Tensor
    spread: torch.Tensor


@forward(IMAGE)
class DataclassOutput(Conv):
    """A dataclass with tensors, a tuple, ``None`` and a number."""

    def forward(self, x):
        y = self.conv(x)
        hidden = (x * 2, y.relu()) if self.training else None
        return Found(y.mean((2, 3)), hidden, x.shape[2])


@forward(IMAGE)
class MixedOutputs(Conv):
    """Sizes, parameters, buffers, text, ``None``, nested lists and named tuples in an output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(3.0))

    def forward(self, x):
        y = self.conv(x)
        return {
            "y": [y, None, (x.shape, x.size(2), y.numel(), len(x), x.ndim)],
            "pair": Pair(y.mean(), y.std()), "weight": self.conv.weight, "scaled": self.steps * 2,
            "what": "image", "empty": [], "type": x.dtype, "bias": self.conv.bias * 2.0,
        }  # fmt: skip


@forward(IMAGE)
class OrderedOutput(Conv):
    """An ``OrderedDict`` as torchvision's segmentation networks give it."""

    def forward(self, x):
        found = collections.OrderedDict()
        y = self.conv(x).relu()
        found["out"] = F.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)
        found["aux"] = y[..., ::2]
        return found


@forward(IMAGE, may_refuse="a generator runs when the call is over")
class GeneratorOutput(Conv):
    """A forward that yields one tensor after the other."""

    def forward(self, x):
        for _ in range(3):
            x = self.conv(x).tanh()
            yield x[:, :, 1:]


@forward(IMAGE, "*", "scale: whole C const", "other: B C H W")
class KeywordsOnly(Conv):
    """Arguments by keyword only, one of them a tensor for the channels, one another image."""

    def forward(self, x, *, scale, other=None, flag=True):
        y = self.conv(x) * scale.view(1, -1, 1, 1)
        return y + other if other is not None and flag else y


@forward("*", "image: B C H W", "time: whole B")
class NothingByPosition(Conv):
    """``network(image=..., time=...)``: a diffusion model's time embedding, gradient too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8))

    def forward(self, image, time):
        freqs = torch.exp(-torch.arange(3, dtype=torch.float64))
        angles = time[:, None] * freqs[None]
        shift, scale = self.embed(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, dim=1)
        return self.conv(image) * (1 + scale[..., None, None]) + shift[:, :, None, None]


@forward(IMAGE, "style: whole B E")
class AdaptiveNorm(nn.Module):
    """Instance norm whose scale and shift come from a style vector (FiLM, AdaIN)."""

    def __init__(self) -> None:
        super().__init__()
        self.affine = nn.Linear(6, 8)

    def forward(self, x, style):
        gamma, beta = self.affine(style).view(x.size(0), 8, 1, 1).split(4, 1)
        y = F.instance_norm(x)
        return gamma * y + beta + F.adaptive_avg_pool2d(x, (1, 1))


@forward(IMAGE, "kernel: whole C 1 3 3")
class WholeOfTheSameDims(nn.Module):
    """A second input with as many dims that is not an image but a kernel."""

    def forward(self, x, kernel):
        return F.conv2d(x, kernel, padding=1, groups=x.shape[1])


@forward(IMAGE, "guide: B 1 H W")
class TwoImages(Conv):
    """Two images with other channels."""

    def forward(self, x, guide):
        y = self.conv(x * guide)
        return torch.cat([y, guide], dim=1), (y - guide).abs().mean()


@forward(IMAGE)
class ItemDecides(Conv):
    """Control flow by ``.item()``, ``bool(tensor)``, ``float(tensor)`` and ``tolist``."""

    def forward(self, x):
        y = self.conv(x)
        if y.abs().mean().item() > 0.05:
            y = y * 2
        if (y > -100).all():
            y = y + float(y.detach().max())
        count = int((y > 0).sum())
        y = y / count
        low, *_ = y.detach().amin((0, 2, 3)).tolist()
        while y.norm() < 1:
            y = y * 2
        return y - low, count > 3


@forward(IMAGE)
class TypeTests(Conv):
    """``isinstance``, ``type(x) is``, ``torch.is_tensor``, ``torch.jit.isinstance`` decide."""

    def forward(self, x):
        y = self.conv(x)
        if isinstance(y, torch.Tensor) and torch.is_tensor(y):
            y = y * 2
        if torch.jit.isinstance([y], list[torch.Tensor]):
            y = y + 1
        if not isinstance(y, list | tuple | numbers.Number):
            y = y.sin()
        return y - 3 if type(x.shape[2]) is int and torch.is_floating_point(x) else y


@forward(IMAGE)
class ExactType(Conv):
    """``type(x) is torch.Tensor`` and ``type(x).__module__``, as some backends choose."""

    def forward(self, x):
        y = self.conv(x)
        if type(y) is torch.Tensor or type(y).__module__.split(".")[0] == "torch":
            return y * 2
        return y * 0


@forward(IMAGE)
class ParametersInNewModules(Conv):
    """Modules made in a forward around the network's parameters, as tensor libraries make them."""

    def forward(self, x):
        held = nn.ParameterList([self.conv.weight, self.conv.bias])
        conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        conv.weight = held[0]
        return conv(x) + held[1].view(-1, 1, 1)


@forward(IMAGE, grids=((3, 1, 2, 1), (3, 1, 1, 2)))
class LargestDecides(nn.Module):
    """Control flow by extremes, where a worker may have no sample and blocks are uneven."""

    def forward(self, x):
        y = F.pad(x, (1, 1, 0, 1), mode="reflect")
        if y.abs().amax() > 1e6:
            return None
        return y * y.max() + y.amin((1, 2, 3), keepdim=True)


@forward(IMAGE)
class ParameterTests(Conv):
    """``isinstance(w, nn.Parameter)`` and ``type(w) is nn.Parameter``, as libraries ask."""

    def forward(self, x):
        w = self.conv.weight
        y = self.conv(x) * (2 if isinstance(w, nn.Parameter) else 3)
        return y * 2 if all(type(p) is nn.Parameter for p in self.parameters()) else y


@forward(IMAGE)
class ShapesInPython(Conv):
    """Sizes as Python numbers: products, ``math``, ``torch.Size`` sliced, ``numpy`` of a size."""

    def forward(self, x):
        y = self.conv(x)
        scale = float(np.sqrt(np.prod(y.shape[2:])))
        target = [int(n * 1.5) for n in y.shape[-2:]]
        flat = y.reshape(-1, y.shape[-1])
        y = F.interpolate(y, target) / scale
        return y, flat.sum(0), torch.tensor(x.shape), x.new_tensor(list(y.size())).log().sum() * y


@forward(IMAGE)
class TensorsInLists(Conv):
    """DenseNet: a growing list of features, concatenated again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 + 2 * i, 2, 3, padding=1) for i in range(3))

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return torch.cat(features, 1)


class Residual(nn.Sequential):
    """A sequence with its input added."""

    def forward(self, x):
        for layer in self:
            y = layer(x)
            x = x + y if y.shape == x.shape else y
        return x


@forward(IMAGE)
class SubclassOfSequential(Residual):
    """A subclass of ``nn.Sequential`` with a forward of its own, indexed, and joined anew."""

    def __init__(self, *layers) -> None:
        inner = Residual(nn.Conv2d(4, 4, 1), nn.ReLU())
        layers = layers or (nn.Conv2d(4, 4, 3, padding=1), inner, nn.Conv2d(4, 3, 1))
        super().__init__(*layers)

    def forward(self, x):
        return (
            super().forward(x)
            + Residual(*list(self)[:2])(x).sum(1, keepdim=True) * self[-1].weight.mean()
        )


@forward(IMAGE)
class ReorderedChildren(nn.Module):
    """Children registered in another order than they are called in, one replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Conv2d(6, 2, 1), nn.Conv2d(4, 4, 1)
        self.middle = nn.Conv2d(4, 6, 3, padding=1)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.branches = nn.ModuleDict({"b": nn.Conv2d(4, 4, 1), "a": nn.Conv2d(4, 4, 1)})

    def forward(self, x):
        x = self.first(x)
        for name in sorted(self.branches):
            x = x + self.branches[name](x).sin()
        return self.last(self.middle(x))


@forward(IMAGE, H=8, W=12, step=4)
class RecursiveUNet(nn.Module):
    """A module that holds one of its own kind, down to some depth."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.inner = RecursiveUNet(depth - 1) if depth else None

    def forward(self, x):
        x = self.conv(x).relu()
        if self.inner is None:
            return x
        low = self.inner(F.avg_pool2d(x, 2))
        return self.out(torch.cat([x, F.interpolate(low, scale_factor=2, mode="nearest")], 1))


@forward(IMAGE)
class LoopToAFixedPoint(Conv):
    """Iterates until the values converge, with a limit and a break."""

    def forward(self, x):
        z = torch.zeros_like(x)
        step = 0
        while step < 6:
            step += 1
            new = torch.tanh(0.1 * self.conv(z) + x)
            if (new - z).abs().max() < 1e-2:
                break
            z = new
        return z, step


@forward(IMAGE)
class MethodsAndProperties(Conv):
    """Forward through other methods, a property, a static method and ``getattr``."""

    @property
    def gain(self):
        return self.conv.weight.square().sum().sqrt()

    @staticmethod
    def squash(y):
        return y / (1 + y.abs())

    def encode(self, x, act="tanh"):
        return getattr(torch, act)(self.conv(x))

    def forward(self, x):
        return self.squash(self.encode(x)) * self.gain, F.__dict__["elu"](self.encode(x, "sin"))


@forward(IMAGE, tolerance=1e-5)
class AutocastInside(Conv):
    """A part in bfloat16 by ``torch.autocast``, the rest not; dtypes must be the same."""

    def forward(self, x):
        y = x.float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            y = F.conv2d(y, self.conv.weight.float(), padding=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            kind = torch.matmul(y, y.transpose(2, 3)).dtype
        return y.double() if kind == torch.bfloat16 else y


@forward(IMAGE, may_refuse="a script hides what it calls")
class ScriptedModule(nn.Module):
    """A module compiled by ``torch.jit.script``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()))

    def forward(self, x):
        return self.net(x)


@forward(IMAGE, may_refuse="numpy sees no graph and no blocks")
class ThroughNumpy(Conv):
    """Values taken to numpy and back."""

    def forward(self, x):
        y = self.conv(x)
        most = np.abs(y.detach().cpu().numpy()).max()
        return y / torch.from_numpy(np.asarray(most)).to(y)


@forward(IMAGE)
class ExceptionsCaught(Conv):
    """An error of torch that the forward expects and handles."""

    def forward(self, x):
        y = self.conv(x)
        try:
            y = y.view(y.size(0), 7, -1)
        except RuntimeError:
            y = y.flatten(1)
        assert y.dim() == 2, f"found {tuple(y.shape)}"
        return y


@forward(IMAGE, "gate: whole const")
class NumberAsTensor(Conv):
    """A 0-dim tensor as an argument, and comparisons of shapes."""

    def forward(self, x, gate):
        y = self.conv(x)
        if x.shape == y.shape and x.size() != torch.Size([1]):
            y = torch.lerp(x, y, gate.sigmoid())
        return y, f"{y.shape[2]}x{y.shape[3]}"
