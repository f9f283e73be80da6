"""Forwards in and of modules: containers, subclasses of layers, sharing, weights made anew."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false, reportAssignmentType=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, parametrizations, prune
from torch.nn.utils.fusion import fuse_conv_bn_weights

from tests.hazards.entries import forward

IMAGE, TOKENS = "x: B C H W", "x: B T D"


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


def _three() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 1), nn.Sigmoid())


@forward(IMAGE)
class SlicesOfSequential(nn.Module):
    """``net[:2]``, ``net[-1]``, ``net[2].bias``, ``reversed``, and layers run until one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _three()

    def until(self, x, stop):
        for name, layer in self.net.named_children():
            if name == stop:
                break
            x = layer(x)
        return x

    def forward(self, x):
        y = self.net[2:](self.net[:2](x)) + self.net[-1](x)
        for layer in reversed(self.net[::2]):
            x = layer(x)
        return y * self.net[2].bias.view(1, -1, 1, 1), x, self.until(x, "2"), len(self.net)


@forward(IMAGE)
class ModuleDictsAndLists(nn.Module):
    """A ``ModuleDict`` by key, ``items`` and ``in``; nested lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Conv2d(4, 2, 1), "b": nn.Conv2d(4, 3, 3, padding=1)})
        self.heads.update({"c": nn.Identity()})
        self.stages = nn.ModuleList([nn.ModuleList([_three() for _ in range(2)]), _three()])

    def forward(self, x):
        for stage in self.stages[0]:
            x = x + stage(x)
        x = self.stages[-1](x)
        assert "a" in self.heads
        return {name: head(x) for name, head in self.heads.items()}, self.heads["a"](x)


@forward(IMAGE)
class ParametersInContainers(nn.Module):
    """``ParameterList`` and ``ParameterDict``: weights of a fusion as in BiFPN."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(1) for _ in range(3))
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.rand(4, 1, 1))})

    def forward(self, x):
        weights = torch.cat([F.relu(w) for w in self.scales])
        weights = weights / (weights.sum() + 1e-4)
        parts = x, x.flip(2), x.roll(1, 3)
        y = sum(w * part for w, part in zip(weights, parts, strict=True))
        return torch.stack(parts, -1) @ weights + self.named["gain"] * y


@forward(IMAGE)
class LayersByNumberedNames(nn.Module):
    """``setattr(self, f"layer{i}", ...)``, ``add_module``, ``get_submodule``, ``_modules``."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(2):
            setattr(self, f"layer{i}", nn.Conv2d(4, 4, 3, padding=1))
        self.add_module("last", nn.Sequential(nn.Conv2d(4, 2, 1)))

    def forward(self, x):
        for i in range(2):
            x = getattr(self, f"layer{i}")(x).relu()
        bias = self.get_parameter("last.0.bias")
        return self._modules["last"](x) + self.get_submodule("last.0")(x) * bias.sum()


@forward(IMAGE)
class CalledWithOtherWeights(Conv):
    """``functional_call`` of a child with weights made in the forward, some left as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        noisy = {name: p * (1 + 0.1 * k) for k, (name, p) in enumerate(self.net.named_parameters())}
        del noisy["0.bias"]
        return functional_call(self.net, noisy, (self.conv(x),)) - functional_call(
            self.conv, {"weight": self.conv.weight.flip(2)}, args=(x,), kwargs={}
        )


class ScaledConv(nn.Conv2d):
    """A subclass that calls ``super().forward``."""

    def __init__(self, *args, gain=2.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gain = gain

    def forward(self, x):
        return super().forward(x * self.gain) + self.weight.mean()


class StandardizedConv(nn.Conv2d):
    """A subclass that changes the weight for ``_conv_forward``."""

    def forward(self, x):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, self.weight - mean, self.bias)


class NormOfChannels(nn.LayerNorm):
    """A layer norm over dim 1 by permutation, as ConvNeXts have it."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class FrozenNorm(nn.BatchNorm2d):
    """A batch norm that never takes the statistics of the batch."""

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


@forward(IMAGE)
class SubclassesOfLayers(nn.Module):
    """Subclasses of convolutions and norms with forwards of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = ScaledConv(4, 4, 3, padding=1, gain=0.5)
        self.b, self.c = StandardizedConv(4, 4, 3, stride=2, padding=1), NormOfChannels(4)
        self.d = FrozenNorm(4)

    def forward(self, x):
        return self.d(self.b(self.c(self.a(x)))), isinstance(self.a, nn.Conv2d)


@forward(IMAGE)
class TransposedTwins(nn.Module):
    """An autoencoder whose decoder uses the encoder's weights, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(6, 3)
        self.back = nn.Parameter(torch.randn(4))

    def forward(self, x):
        z = self.linear(self.conv(x).movedim(1, -1)).tanh()
        y = F.linear(z, self.linear.weight.t()).movedim(-1, 1)
        return F.conv_transpose2d(y, self.conv.weight, self.back, padding=1)


@forward(IMAGE)
class OneBlockThreeTimes(nn.Module):
    """``[block] * 3`` in a list, and the same block in a dict and as an attribute of a child."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([block] * 3)
        self.others = nn.ModuleDict({"again": block, "other": nn.Identity()})
        self.others["other"].inner = block

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.others["again"](x) + self.others["other"].inner[0](x)


@forward(IMAGE)
class LazilyMade(nn.Module):
    """Lazy layers that a first call in ``__init__`` gave their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyConv2d(5, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU())
        self.net(torch.zeros(1, 4, 5, 5))

    def forward(self, x):
        return self.net(x), self.net[0].in_channels


@forward(IMAGE)
class LayersInAPlainList(nn.Module):
    """Layers in a plain list, not a ``ModuleList``, and a plain tensor, which nobody registers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.layers = [nn.Conv2d(4, 4, 3, padding=1).double()]
        self.scale = torch.linspace(0, 1, 4, dtype=torch.float64).view(4, 1, 1)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


@forward(IMAGE)
class ForwardSetInInit(Conv):
    """``self.forward = partial(self.run, ...)``, as networks with several modes have it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(self.run, gain=2.0)

    def run(self, x, gain):
        return self.conv(x) * gain


@forward(IMAGE)
class MethodsKept(Conv):
    """Bound methods and functions in attributes: of a child, of itself, and a lambda."""

    def __init__(self) -> None:
        super().__init__()
        self.act = lambda t: t * torch.sigmoid(t)
        self.apply_conv, self.head = self.conv.forward, self.own

    def own(self, x):
        return x * self.conv.bias.sum()

    def forward(self, x):
        return self.head(self.act(self.apply_conv(x)))


@forward(IMAGE)
class FusedInEvaluation(Conv):
    """RepVGG: branches in training; in evaluation one kernel, of padded and identity kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        if self.training:
            return self.norm(self.conv(x) + self.point(x) + x)
        w = self.conv.weight + F.pad(self.point.weight, [1, 1, 1, 1])
        identity = torch.zeros_like(w)
        for i in range(4):
            identity[i, i, 1, 1] = 1
        n, b = self.norm, self.conv.bias + self.point.bias
        w, b = fuse_conv_bn_weights(
            w + identity, b, n.running_mean, n.running_var, n.eps, n.weight, n.bias
        )
        return F.conv2d(x, w, b, padding=1)


@forward(IMAGE)
class HookOfAForward(nn.Module):
    """Features taken by a hook that a forward registers and removes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _three()

    def forward(self, x):
        seen = {}
        handles = [
            layer.register_forward_hook(lambda m, args, out, n=n: seen.update({n: out}))
            for n, layer in self.net.named_children()
        ]
        try:
            y = self.net(x)
        finally:
            for handle in handles:
                handle.remove()
        return y, seen["0"], sorted(seen), len(self.net[0]._forward_hooks)


@forward(IMAGE)
class PrunedWeights(Conv):
    """``torch.nn.utils.prune``: a mask in a buffer, ``weight_orig``, a hook before the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 3, 1)
        prune.l1_unstructured(self.conv, "weight", amount=0.4)
        prune.ln_structured(self.last, "weight", amount=0.25, n=2, dim=0)

    def forward(self, x):
        return self.last(self.conv(x).tanh()) * self.conv.weight_orig.square().mean()


@forward(IMAGE)
class OrthogonalWeights(nn.Module):
    """``parametrizations.orthogonal``: a weight by a matrix exponential, and by Cayley's map."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="matrix_exp")
        self.b = parametrizations.orthogonal(nn.Linear(4, 3), orthogonal_map="cayley")

    def forward(self, x):
        return self.b(self.a(x.movedim(1, -1)).tanh())


@forward(IMAGE)
class PenaltyOnWeights(Conv):
    """A penalty over all parameters: as one vector, by name, and only of convolutions."""

    def forward(self, x):
        vector = parameters_to_vector(self.parameters())
        named = sum(p.abs().sum() for n, p in self.named_parameters() if not n.endswith("bias"))
        layers = [m for m in self.modules() if isinstance(m, nn.Conv2d)]
        count = sum(p.numel() for p in self.parameters() if p.requires_grad)
        l2 = torch.stack([m.weight.norm() for m in layers]).sum()
        return self.conv(x), vector.norm() + named + l2, count


@forward(IMAGE)
class ClippedInForward(Conv):
    """Weights changed in place without a graph: clipped, and renormed by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        with torch.no_grad():
            self.conv.weight.clamp_(-0.1, 0.1)
            self.last.weight.copy_(torch.renorm(self.last.weight, 2, 0, 0.5))
        return self.last(self.conv(x))


@forward(IMAGE)
class InitialisedByTheFirstBatch(Conv):
    """Glow's ActNorm: scale and shift written from the statistics of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.scale = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        y = self.conv(x)
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                flat = y.permute(1, 0, 2, 3).contiguous().view(y.shape[1], -1)
                self.loc.data.copy_(-flat.mean(1)[None, :, None, None])
                self.scale.data.copy_(1 / (flat.std(1)[None, :, None, None] + 1e-6))
                self.initialized.fill_(1)
        h, w = y.shape[2:]
        return self.scale * (y + self.loc), h * w * self.scale.abs().log().sum()


@forward(IMAGE)
class QueueOfKeys(Conv):
    """MoCo: a queue in a buffer, written at a pointer that wraps, and read as negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(4, 6), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        q = F.normalize(self.conv(x).mean((2, 3)), dim=1)
        keys = F.normalize(self.conv(x.flip(3)).mean((2, 3)).detach(), dim=1)
        positive = torch.einsum("nc,nc->n", q, keys).unsqueeze(-1)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], dim=1) / 0.2
        start, count = int(self.pointer), keys.shape[0]
        if self.training and start + count <= 6:
            self.queue[:, start : start + count] = keys.T
            self.pointer[0] = (start + count) % 6
        return logits, F.cross_entropy(logits, torch.zeros(count, dtype=torch.long))


@forward(IMAGE)
class RegisteredInForward(Conv):
    """A buffer that the first forward registers, and an attribute that it deletes."""

    def forward(self, x):
        y = self.conv(x)
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(4, dtype=x.dtype), persistent=False)
        if self.training:
            self.mean += y.detach().mean((0, 2, 3))
            self.last = y
            del self.last
        return y - self.mean.view(-1, 1, 1), "mean" in dict(self.named_buffers())


@forward(IMAGE, B=4, step=0)
class MinibatchDeviation(Conv):
    """StyleGAN's last layer: deviation over groups of samples as another channel."""

    def forward(self, x):
        _, c, h, w = x.shape
        y = self.conv(x).reshape(2, -1, 2, c // 2, h, w)
        y = (y - y.mean(dim=0)).square().mean(dim=0)
        y = (y + 1e-8).sqrt().mean(dim=[2, 3, 4]).reshape(-1, 2, 1, 1)
        return torch.cat([x, y.repeat(2, 1, h, w)], dim=1)


@forward(IMAGE, "style: whole B 4")
class ModulatedConvolution(nn.Module):
    """StyleGAN2: a weight a sample, scaled by its style and normalised, in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))

    def forward(self, x, style):
        b, c, h, w = x.shape
        weight = self.weight.unsqueeze(0) * style.reshape(b, 1, -1, 1, 1)
        weight = weight * (weight.square().sum(dim=[2, 3, 4], keepdim=True) + 1e-8).rsqrt()
        y = F.conv2d(x.reshape(1, -1, h, w), weight.reshape(-1, c, 3, 3), padding=1, groups=b)
        return y.reshape(b, -1, *y.shape[2:])
