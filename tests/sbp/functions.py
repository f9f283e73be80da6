"""Ways to apply an ``autograd.Function``, each as a function of ``y`` and of a weight ``w``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

T = torch.Tensor


class Scaled(Function):
    """``k * x``, whose gradient is ``-k * g``: neither the exact one, nor linear in blocks."""

    @staticmethod
    def forward(ctx: Any, x: T, k: float = 2.0) -> T:
        ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        return -ctx.k * gradients[0] / gradients[0].norm(), None


class Child(Scaled):
    """A subclass that changes the backward."""

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        return 3 * gradients[0] + gradients[0].mean(), None


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return (4 * x).round()

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:
        return gradients[0]


class Product(Function):
    """A product in the style of ``setup_context``, with double backward and generated vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: T, w: T) -> T:
        return x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: T) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        x, w = ctx.saved_tensors
        (g,) = gradients
        return g * w, (g * x).sum((0, 2, 3)).reshape(w.shape)


class Sorted(Function):
    """Several outputs, one of them not differentiable, and a backward used once."""

    @staticmethod
    def forward(ctx: Any, x: T, dim: int, *, scale: float = 1.0) -> Any:
        values, places = x.sort(dim)
        ctx.dim, ctx.scale = dim, scale
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        return values * scale, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: T) -> Any:
        (places,) = ctx.saved_tensors
        g = torch.zeros_like(gradients[0])
        return g.scatter_(ctx.dim, places, ctx.scale * gradients[0]), None


class Cast(Function):
    """The style of mixed precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: T) -> T:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: T) -> T:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * 2


class Loss(Function):
    """A loss that computes its gradient in forward."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            loss = own.exp().sum().log()
            ctx.save_for_backward(*torch.autograd.grad(loss, own))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:
        return ctx.saved_tensors[0] * gradients[0]


class Joined(Function):
    """Tensors of a list are no inputs of a Function; those beside it are."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *parts: T) -> T:
        ctx.count = len(parts)
        return torch.cat(parts, 1) * options["scale"] + options["mean"]

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        return None, *(2 * g for g in gradients[0].chunk(ctx.count, 1))


class Partly(Function):
    """No gradient for an input, unused outputs, and gradients that are not materialized."""

    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> Any:
        ctx.set_materialize_grads(False)
        return x.clone(), w * x.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: T | None) -> Any:
        assert gradients[1] is None
        return gradients[0], None


class Own(Function):
    """``apply`` itself is overridden."""

    @classmethod
    def apply(cls, x: T, *options: Any) -> Any:
        return super().apply(x, *options or [3.0])

    @staticmethod
    def forward(ctx: Any, x: T, k: float) -> T:
        ctx.k = k
        return x**2

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        return gradients[0] * ctx.k, None


scaled, rounded, product, cast = Scaled.apply, Rounded.apply, Product.apply, Cast.apply

TABLE = {"round": Rounded.apply}
CHAIN = [Scaled.apply, Child.apply, Rounded.apply]


@functools.wraps(scaled)
def wrapper(*args: Any) -> Any:
    return scaled(*args)


class Holder:
    run = staticmethod(Product.apply)
    kind = Child


class Nested(torch.nn.Module):
    def forward(self, x: T) -> T:
        return torch.nn.Sequential(Inner())(x) + 1


class Inner(torch.nn.Module):
    def forward(self, x: T) -> T:
        return scaled(x, 0.3)


def hooked(y: T, w: T) -> T:
    layer = torch.nn.Identity()
    layer.register_forward_hook(lambda module, args, found: scaled(found, 0.7))
    layer.register_forward_pre_hook(lambda module, args: (rounded(args[0]),))
    return layer(y)


def gradient_hook(y: T, w: T) -> T:
    z = y * 1
    if z.requires_grad:
        z.register_hook(lambda g: Scaled.apply(g, 0.5))
    return z.exp()


def chained(y: T, w: T) -> T:
    for function in CHAIN:
        y = function(y)
    return y


def twice(y: T, w: T) -> T:
    z = product(y, w)
    if not z.requires_grad:
        return z
    (g,) = torch.autograd.grad(z.square().sum(), y, create_graph=True)
    return z + g.square()


def low(y: T, w: T) -> T:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cast(y).to(y.dtype)


Way = Callable[[T, T], Any]
WAYS: dict[str, Way] = {
    "class": lambda y, w: Scaled.apply(y),
    "bound at import": lambda y, w: scaled(y, 0.5),
    "alone": lambda y, w: rounded(y),
    "partial": lambda y, w: functools.partial(scaled, y)(0.25),
    "partial of apply": lambda y, w: functools.partial(Product.apply, w=w)(y),
    "wraps": lambda y, w: wrapper(y, 1.5),
    "static attribute": lambda y, w: Holder.run(y, w),
    "class attribute": lambda y, w: Holder.kind.apply(y),
    "dict": lambda y, w: TABLE["round"](y),
    "getattr": lambda y, w: getattr(Child, "ap" + "ply")(y, 2.0),
    "list": chained,
    "map": lambda y, w: sum(map(scaled, [y, y * 2]), y),
    "subclass": lambda y, w: Child.apply(y),
    "overridden apply": lambda y, w: Own.apply(y),
    "nested module": lambda y, w: Nested()(y),
    "hooks": hooked,
    "hook of a gradient": gradient_hook,
    "setup_context": lambda y, w: product(y, w),
    "by name": lambda y, w: product(y, w=w),
    "plain first": lambda y, w: product(y.mean((0, 2, 3), keepdim=True) + y, w.exp()),
    "double backward": twice,
    "several outputs": lambda y, w: Sorted.apply(y, 2)[0],
    "all outputs": lambda y, w: (lambda v, i: v * i)(*Sorted.apply(y, 3)),
    "list and dict": lambda y, w: Joined.apply({"scale": 2.0, "mean": w.detach().mean()}, y, y**2),
    "unused output": lambda y, w: Partly.apply(y, w)[0],
    "mixed precision": lambda y, w: cast(y),
    "autocast": low,
    "loss": lambda y, w: y + Loss.apply(y),
    "checkpoint": lambda y, w: checkpoint(lambda x: scaled(x.sin(), 3.0), y, use_reentrant=False),
    "reentrant": lambda y, w: checkpoint(lambda x: product(x.sin(), w), y, use_reentrant=True),
    "recomputed alone": lambda y, w: checkpoint(rounded, y, use_reentrant=True),
    "view": lambda y, w: scaled(y.transpose(1, 2)[:, 1:]),
    "same tensor": lambda y, w: product(y, y[:1, :, :1, :1]),
}
