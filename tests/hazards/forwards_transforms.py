"""Forwards that transform functions: vmap, jvp, saved tensors, hooks, modes and decorators."""

# Forwards are typed as people type them: not at all.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOptionalCall=false, reportAssignmentType=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from tests.hazards.entries import forward

IMAGE, TOKENS = "x: B C H W", "x: B T D"


class Conv(nn.Module):
    """A convolution first, so that its output is not a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)


@forward(IMAGE, may_refuse="torch.func reaches global tensors past their functions")
class EnsembleByVmap(nn.Module):
    """Weights of three members stacked, each applied by ``vmap`` to the same image."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        flat = x.flatten(2)
        return torch.vmap(lambda w, t: w @ t, in_dims=(0, None), out_dims=1)(self.weights, flat)


@forward(IMAGE, may_refuse="torch.func reaches global tensors past their functions")
class GradientByFunc(Conv):
    """``torch.func.grad`` and ``vjp`` of an energy."""

    def forward(self, x):
        y = self.conv(x)
        force = torch.func.grad(lambda t: (t**4).sum())(y)
        value, pull = torch.func.vjp(torch.sin, y)
        return force, pull(value)[0]


@forward(IMAGE, may_refuse="torch.func reaches global tensors past their functions")
class JacobianByFunc(Conv):
    """``jacrev`` of the channels' means."""

    def forward(self, x):
        return torch.func.jacrev(lambda t: t.square().mean(0))(self.conv(x).mean((2, 3)))


@forward(IMAGE, may_refuse="forward mode is not dispatched")
class DualNumbers(Conv):
    """Forward mode by dual numbers: a value with its tangent."""

    def forward(self, x):
        y = self.conv(x)
        with fwAD.dual_level():
            dual = fwAD.make_dual(y, torch.ones_like(y))
            value, tangent = fwAD.unpack_dual(dual.sin() * 2)
        return value + tangent


@forward(IMAGE)
class JacobianByAutograd(Conv):
    """``autograd.functional``: products with a Jacobian and with a Hessian."""

    def forward(self, x):
        y = self.conv(x)
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            _, a = torch.autograd.functional.vjp(torch.sin, y, y, create_graph=create)
            _, b = torch.autograd.functional.hvp(
                lambda t: (t**3).sum(), y, torch.ones_like(y), create_graph=create
            )
        return a, b


@forward(IMAGE)
class CurvatureInForward(Conv):
    """A gradient of a gradient: the Laplacian of a field by two passes of autograd."""

    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().clone().requires_grad_()
            spare = torch.zeros(3, requires_grad=True)
            field = self.conv(z).sin()
            (g, none) = torch.autograd.grad(
                field.sum(), [z, spare], create_graph=True, allow_unused=True
            )
            (h,) = torch.autograd.grad(g.square().sum(), z, create_graph=True)
        return g, h, none is None


class Scaled(torch.autograd.Function):
    """The newer form: ``setup_context``, ``needs_input_grad``, an output without gradient."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x * w * k, (x > 0).int()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.k = inputs
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        of_x = gradient * w * ctx.k if ctx.needs_input_grad[0] else None
        of_w = (
            (gradient * x * ctx.k).sum((0, 2, 3), keepdim=True) if ctx.needs_input_grad[1] else None
        )
        return of_x, of_w, None


@forward(IMAGE)
class FunctionWithSetup(Conv):
    """A function in the newer form, with two outputs, a parameter and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(1, 4, 1, 1))

    def forward(self, x):
        y, positive = Scaled.apply(self.conv(x), self.w, 3)
        frozen, _ = Scaled.apply(y, self.w.detach(), 1)
        return y + frozen, positive


class Rectified(torch.autograd.Function):
    """Changes its input in place, as in-place batch norms do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


@forward(IMAGE, may_refuse="a function that changes its input in place")
class FunctionInPlace(Conv):
    """``mark_dirty``: the input is the output."""

    def forward(self, x):
        y = self.conv(x)
        z = Rectified.apply(y)
        return z + y


class Reversible(torch.autograd.Function):
    """RevNet: computes its inputs again in backward, by ``enable_grad`` and ``grad`` within."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, f: nn.Module) -> Any:
        ctx.f = f
        y = a + f(b)
        ctx.save_for_backward(y.detach(), b.detach())
        return y, b.clone()

    @staticmethod
    def backward(ctx: Any, of_y: torch.Tensor, of_b: torch.Tensor) -> Any:
        _, b = ctx.saved_tensors
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            found = torch.autograd.grad(ctx.f(b), b, of_y)
        return of_y, of_b + found[0], None


@forward(IMAGE, may_refuse="a backward calls a module of the network")
class ReversibleBlock(nn.Module):
    """Halves of the channels through a function that recomputes in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.f = (
            nn.Conv2d(4, 4, 1),
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()),
        )
        self.f.requires_grad_(False)

    def forward(self, x):
        a, b = self.first(x).chunk(2, 1)
        return torch.cat(Reversible.apply(a, b, self.f), 1)


@forward(IMAGE)
class SavedTensorsPacked(Conv):
    """``saved_tensors_hooks`` that pack what backward keeps, and ``save_on_cpu``."""

    def forward(self, x):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (t, 1), lambda kept: kept[0])
        with hooks:
            y = self.conv(x).sin() * x
        with torch.autograd.graph.save_on_cpu():
            return self.conv(y).exp() * y


@forward(IMAGE)
class CheckpointsOfEveryKind(Conv):
    """Checkpoints with keywords, several outputs, ``None``, nested ones, and a partial function."""

    def block(self, x, scale, *, shift=None):
        y = self.conv(x) * scale
        return {"y": y if shift is None else y + shift, "none": None}

    def pair(self, x):
        inner = checkpoint(torch.sin, x, use_reentrant=False)
        return inner * 2, self.conv(inner).mean((2, 3)), None

    def forward(self, x):
        y = checkpoint(self.block, x, 2.0, shift=x.mean(), use_reentrant=False)["y"]
        a, b, _ = checkpoint(self.pair, y, use_reentrant=False, preserve_rng_state=False)
        run = functools.partial(F.interpolate, scale_factor=2, mode="bilinear")
        return (
            checkpoint(run, a, use_reentrant=True),
            b,
            checkpoint(self.pair, x, use_reentrant=True),
        )


@forward(IMAGE)
class HooksAfterAccumulation(Conv):
    """``register_post_accumulate_grad_hook`` on a parameter, which halves the gradient in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(p):
        p.grad.mul_(0.5)

    def forward(self, x):
        return self.conv(self.conv(x).tanh())


@forward(IMAGE)
class FrozenTeacher(Conv):
    """A teacher without gradients in evaluation; features matched by losses, a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.teacher.eval().requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    @torch.no_grad()
    def target(self, x):
        return self.teacher(x)

    def forward(self, x):
        y, t = self.conv(x), self.target(x)
        attention = [F.normalize(f.pow(2).mean(1).flatten(1)) for f in (y, t)]
        loss = F.kl_div(F.log_softmax(y / 4, 1), F.softmax(t / 4, 1), reduction="none").sum(1)
        return y, loss.mean() * 16, (attention[0] - attention[1]).pow(2).mean()


@forward(IMAGE)
class InferenceInside(Conv):
    """Statistics under ``inference_mode``, cloned before the graph reads them."""

    def forward(self, x):
        y = self.conv(x)
        with torch.inference_mode():
            scale = y.abs().mean() + 1
        return y / scale.clone(), scale.is_inference()


@forward(IMAGE)
class ContextsOfTorch(Conv):
    """``record_function``, ``sdpa_kernel``, autocast as a decorator, warnings caught."""

    @torch.autocast("cpu", enabled=False)
    def attend(self, t):
        with sdpa_kernel([SDPBackend.MATH]):
            return F.scaled_dot_product_attention(t, t, t)

    def forward(self, x):
        with record_function("conv"), torch.autograd.set_detect_anomaly(False):
            y = self.conv(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = F.softmax(y.flatten(2).mT)
        return self.attend(y) * 2 if not torch.is_autocast_enabled("cpu") else y


@torch.jit.ignore
def measured(t):
    return t.detach().abs().amax((2, 3), keepdim=True)


@torch.compiler.disable
def shifted(t):
    return t + 1


@torch.jit.script_if_tracing
def cropped(t, n: int):
    return t[:, :, n:, n:]


@forward(IMAGE)
class DecoratorsOfScripts(Conv):
    """Functions for scripts and compilers, and questions whether one is at work."""

    @torch.jit.export
    def doubled(self, x):
        return torch.jit.annotate(torch.Tensor, x) * 2

    @torch.jit.unused
    def spare(self, x):
        return x

    def forward(self, x):
        y = self.conv(x) / measured(x)
        if torch.jit.is_scripting() or torch.jit.is_tracing() or torch.compiler.is_compiling():
            return y
        return cropped(shifted(self.doubled(y)), 2) + self.spare(y)[..., 2:, 2:]


@forward(IMAGE)
class RungeKutta(Conv):
    """A neural ODE: steps of fourth order, a step that adapts to the error, a list of states."""

    def forward(self, x):
        def f(t, y):
            return torch.tanh(self.conv(y)) * (1 + t)

        states, t, h = [x], 0.0, 0.5
        while t < 0.99:
            y = states[-1]
            k1 = f(t, y)
            k2 = f(t + h / 2, y + h / 2 * k1)
            k3 = f(t + h / 2, y + h / 2 * k2)
            k4 = f(t + h, y + h * k3)
            new = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            if (new - y - h * k1).norm() / y.norm() > 0.3 and h > 0.2:
                h = h / 2
                continue
            states.append(new)
            t += h
        return torch.stack(states, dim=0), len(states)
