"""Forwards that use autograd: custom functions, checkpoints, parts without a graph, hooks."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.hazards.entries import forward

IMAGE = "x: B C H W"


class Swish(torch.autograd.Function):
    """``x * sigmoid(x)`` that saves its input alone, as EfficientNets had it."""

    @staticmethod
    def forward(ctx: Any, i: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(i)
        return i * torch.sigmoid(i)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (i,) = ctx.saved_tensors
        s = torch.sigmoid(i)
        return gradient * (s * (1 + i * (1 - s)))


class ReverseGradient(torch.autograd.Function):
    """Gradient reversal of domain adaptation, with a number among the arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha: float) -> torch.Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.alpha * gradient, None


class NormalizedRows(torch.autograd.Function):
    """Mixes cells along the last dim and has two outputs and a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.mean(-1, keepdim=True)
        ctx.save_for_backward(x, w, mean)
        return (x - mean) * w, mean

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, of_mean: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, w, mean = ctx.saved_tensors
        inner = gradient * w
        of_x = inner - inner.mean(-1, keepdim=True) + of_mean / x.shape[-1]
        return of_x, (gradient * (x - mean)).sum()


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@forward(IMAGE)
class OwnFunction(Conv):
    """``autograd.Function.apply`` of a function of each cell, and of gradient reversal."""

    def forward(self, x):
        y = Swish.apply(self.conv(x))
        return ReverseGradient.apply(y, 0.3) + y


@forward(IMAGE)
class OwnFunctionThatMixes(nn.Module):
    """``autograd.Function.apply`` that mixes cells along a dim that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        y, mean = NormalizedRows.apply(x * 2, self.w)
        return y.sin() + mean, mean


@forward(IMAGE)
class OwnFunctionOnParameters(Conv):
    """``autograd.Function.apply`` on a weight alone, as binarised networks do."""

    def forward(self, x):
        return F.conv2d(x, Swish.apply(self.conv.weight), self.conv.bias, padding=1)


@forward(IMAGE)
class Checkpointed(Conv):
    """Checkpointing without reentry, of a function that closes over a module."""

    def forward(self, x):
        y = checkpoint(lambda t: F.gelu(self.conv(t)), x, use_reentrant=False)
        return y + checkpoint(self.conv, y, use_reentrant=False)


@forward(IMAGE)
class CheckpointedReentrantly(Conv):
    """The older checkpointing, which is an ``autograd.Function``, and of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        y = checkpoint(self.conv, x, use_reentrant=True)
        return checkpoint_sequential(self.layers, 2, y, use_reentrant=True)


@forward(IMAGE, random=True)
class CheckpointedDropout(Conv):
    """A checkpoint whose dropout must drop the same cells again."""

    def forward(self, x):
        def block(t: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.conv(t), 0.5, self.training).tanh()

        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=True)


@forward(IMAGE)
class Islands(Conv):
    """``torch.no_grad()`` islands, ``@torch.no_grad()`` methods, ``enable_grad`` within."""

    @torch.no_grad()
    def statistics(self, y):
        with torch.enable_grad():
            inner = (y.detach() * 2).sum()
        return y.mean((2, 3), keepdim=True), inner

    def forward(self, x):
        y = self.conv(x)
        with torch.no_grad():
            scale = y.abs().amax((2, 3), keepdim=True)
        mean, inner = self.statistics(y)
        return y / scale - mean, inner, scale


@forward(IMAGE)
class GradModeBranches(Conv):
    """``torch.is_grad_enabled()``, ``x.requires_grad`` and ``self.training`` decide."""

    def forward(self, x):
        y = self.conv(x)
        if torch.is_grad_enabled() and y.requires_grad:
            y = y * 2
        if not y.is_leaf and y.grad_fn is not None:
            y = y + 1
        return y.sin() if self.training else y.cos()


@forward(IMAGE)
class StraightThrough(Conv):
    """Rounded forward, straight through in backward; ``detach`` on either side."""

    def forward(self, x):
        y = self.conv(x)
        hard = (y > 0).to(y.dtype)
        quantized = (y * 8).round() / 8
        return hard.detach() - y.sigmoid().detach() + y.sigmoid(), y + (quantized - y).detach()


@forward(IMAGE)
class DetachedTarget(Conv):
    """A second branch whose gradient stops, in the middle and at its parameters."""

    def forward(self, x):
        online = self.conv(x)
        target = self.conv(x.flip(3)).detach()
        frozen = F.conv2d(x, self.conv.weight.detach(), padding=1)
        return (online * target).sum(1), frozen, online.detach()


@forward(IMAGE)
class GradientInForward(nn.Module):
    """Forces as the negative gradient of an energy, with the graph for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.net(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -force


@forward(IMAGE)
class GradientPenalty(Conv):
    """The gradient of a critic with respect to its input, squared (WGAN-GP), retained."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.conv(x).mean()
        x = x if x.requires_grad else x.requires_grad_()
        score = self.conv(x).square().mean((1, 2, 3))
        (gradient,) = torch.autograd.grad(
            score, x, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
        )
        return score.mean() + ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


@forward(IMAGE)
class HookOnActivation(Conv):
    """``register_hook`` that scales a gradient, and ``retain_grad``."""

    def forward(self, x):
        y = self.conv(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y.sin()


@forward(IMAGE)
class ClampedGradient(Conv):
    """A hook that needs the whole gradient: scaled to norm one over all cells."""

    def forward(self, x):
        y = self.conv(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / gradient.norm())
        return y.sin()


@forward(IMAGE)
class ForwardHooks(Conv):
    """Hooks on inner modules: one reads, one replaces, one before changes the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.features = nn.Sigmoid(), {}
        self.conv.register_forward_hook(lambda m, args, out: out * 2)
        self.act.register_forward_hook(self.keep)
        self.act.register_forward_pre_hook(lambda m, args: (args[0] + 1,))

    def keep(self, module, args, out):
        self.features["act"] = out

    def forward(self, x):
        y = self.act(self.conv(x))
        return y, self.features["act"].mean((2, 3))


class Scaled(nn.Module):
    """Called by keyword."""

    def forward(self, x, *, scale=1.0, shift=None):
        return x * scale if shift is None else x * scale + shift


@forward(IMAGE)
class PreHookWithKeywords(Conv):
    """A pre-hook and a hook ``with_kwargs``, one of which adds a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()
        self.scaled.register_forward_pre_hook(
            lambda m, args, kwargs: (args, kwargs | {"shift": args[0].mean()}), with_kwargs=True
        )
        self.scaled.register_forward_hook(
            lambda m, args, kwargs, out: out - kwargs["scale"], with_kwargs=True
        )

    def forward(self, x):
        return self.scaled(self.conv(x), scale=3.0)


@forward(IMAGE)
class BackwardHooks(Conv):
    """Full backward hooks of modules: one looks, one before it scales, one replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(4, 3, 1)
        self.conv.register_full_backward_hook(lambda m, given, wanted: None)
        self.last.register_full_backward_hook(lambda m, given, wanted: (given[0] * 0.5,))
        self.last.register_full_backward_pre_hook(lambda m, wanted: (wanted[0] * 3,))

    def forward(self, x):
        return self.last(self.conv(x).tanh())


@forward(IMAGE)
class HooksOnParameters(Conv):
    """A hook on a parameter that scales its gradient, as GANs and mixed precision have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.weight.register_hook(lambda gradient: gradient * 0.1)

    def forward(self, x):
        return self.conv(self.conv(x).relu())


@forward(IMAGE)
class FrozenPart(Conv):
    """Parameters without gradients below, batch norm kept in eval by ``train``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
        for p in self.conv.parameters():
            p.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.head(self.norm(self.conv(x)))


@forward(IMAGE)
class UnusedParameters(Conv):
    """A branch that only training takes, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary, self.spare = nn.Conv2d(4, 2, 1), nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.conv(x)
        return (y, self.auxiliary(y)) if self.training else (y, None)


@forward(IMAGE, may_refuse="torch.func reaches global tensors past their functions")
class VectorizedMap(Conv):
    """``torch.vmap`` over the batch."""

    def forward(self, x):
        return torch.vmap(lambda t: t / (1 + t.square().mean()))(self.conv(x))


@forward(IMAGE, may_refuse="forward mode is not dispatched")
class JacobianProduct(Conv):
    """``torch.func.jvp`` of a small function."""

    def forward(self, x):
        return torch.func.jvp(torch.sin, (self.conv(x),), (torch.ones_like(x),))[1]


@forward(IMAGE)
class InnerStep(Conv):
    """MAML: a gradient of the weights in the forward, and the forward again with other weights."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.conv(x)
        weights = tuple(self.conv.parameters())
        loss = self.conv(x).square().mean()
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        w, b = (p - 0.1 * g for p, g in zip(weights, gradients, strict=True))
        names = {"weight": w, "bias": b}
        return F.conv2d(x, w, b, padding=1) + torch.func.functional_call(self.conv, names, (x,))


@forward(IMAGE)
class AdaptiveWeightOfLosses(Conv):
    """VQGAN: two losses balanced by the norms of their gradients at the last weight, detached."""

    def forward(self, x):
        y = self.conv(x)
        a, b = y.abs().mean(), y.square().mean((0, 2, 3)).sum()
        if not torch.is_grad_enabled():
            return a + b
        last = self.conv.weight
        of_a = torch.autograd.grad(a, last, retain_graph=True)[0]
        of_b = torch.autograd.grad(b, last, retain_graph=True)[0]
        weight = torch.norm(of_a) / (torch.norm(of_b) + 1e-4)
        return a + torch.clamp(weight, 0.0, 1e4).detach() * b


@forward("x: B C H W")
class HookOfAnUnusedWeight(nn.Module):
    """A hook on a weight that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.last.weight.register_hook(lambda gradient: gradient / 2)

    def forward(self, x):
        y = self.first(x)
        return self.last(y) if self.training else y
