"""Functions and hooks of a user that receive gradients of plain tensors in a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist.errors import ConversionError
from gpudist.world.partition import Partition
from tests.pool import distributed

T = torch.Tensor


class Signed(torch.autograd.Function):
    """A function whose backward is not linear in the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: T, k: float = 1.0) -> T:
        return w * k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.k = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        return ctx.k * not_linear(gradients[0]), None


class Pair(torch.autograd.Function):
    """Several inputs and outputs; computes what is needed."""

    @staticmethod
    def forward(ctx: Any, w: T, v: T) -> Any:
        ctx.save_for_backward(w)
        return w * 2, w + v

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        (w,) = ctx.saved_tensors
        first, second = ctx.needs_input_grad
        g, h = gradients
        return w * g.sign() + h if first else None, h.abs() if second else None


class Nested(torch.autograd.Function):
    """A function whose forward applies another one, and keeps its graph."""

    @staticmethod
    def forward(ctx: Any, w: T) -> T:
        with torch.enable_grad():
            ctx.given = w.detach().requires_grad_()
            ctx.found = signed(ctx.given)
        return ctx.found.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        return torch.autograd.grad(ctx.found, ctx.given, gradients[0])


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: T) -> T:
        ctx.mark_dirty(w)
        return w.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:
        return gradients[0]


signed = Signed.apply


def not_linear(g: T) -> T:
    return g.sign() + g / (1 + g.norm())


class Network(nn.Module):
    def __init__(self, way: Any) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(1)
        self.w, self.v = (
            nn.Parameter(torch.randn(3, 1, 1, generator=made, dtype=torch.float64))
            for _ in range(2)
        )
        self.kept = {"w": self.w}
        self.way = way

    def forward(self, x: T) -> T:
        return self.way(self, x)


def hooked(w: T) -> T:
    w.register_hook(not_linear)
    return w


def in_place_hook(n: Network, x: T) -> T:
    def clip(g: T) -> None:
        with torch.no_grad():
            g.clamp_(-1e-3, 1e-3)

    w = n.w * 2
    w.register_hook(clip)
    return x * w


def module_hooks(n: Network, x: T) -> T:
    inner, pre = nn.Identity(), nn.Tanh()
    inner.register_full_backward_hook(lambda module, given, found: (not_linear(given[0]),))
    pre.register_full_backward_pre_hook(lambda module, found: (not_linear(found[0]),))
    return x * inner(n.w * 1) * pre(n.v * 1)


def leaf() -> T:
    return torch.linspace(-1, 1, 3, dtype=torch.float64).view(3, 1, 1).requires_grad_()


def gradient_within(n: Network, x: T) -> T:
    z = leaf()
    loss = (signed(z * n.w) * x).square().sum() + (z * x).sum() + z.sum()
    (g,) = torch.autograd.grad(loss, z, create_graph=True)
    (h,) = torch.autograd.grad(signed(n.v * 2).pow(3).sum(), n.v, create_graph=True)
    return x * g * h


def plain_gradient_within(n: Network, x: T) -> T:
    w = n.w * 2
    w.register_hook(not_linear)
    (g,) = torch.autograd.grad(w.square().sum(), n.w, create_graph=True)
    return x * g.detach() * n.v


def backward_within(n: Network, x: T) -> T:
    z, plain, listed = leaf(), leaf(), leaf()
    hooked(z)
    (signed(z) * x.detach() + z * x.detach()).square().sum().backward()
    (plain * n.v.detach()).square().sum().backward()
    torch.cat([x.detach(), listed.expand(2, 3, 1, 4)], 2).square().sum().backward()
    assert z.grad is not None and plain.grad is not None and listed.grad is not None
    return x * n.w * (z.grad + plain.grad + listed.grad)


WAYS: dict[str, Callable[[Network, T], Any]] = {
    "parameter": lambda n, x: x * Signed.apply(n.w),
    "bound at import": lambda n, x: x * signed(n.w, 2.0),
    "expression": lambda n, x: x * signed(n.w * n.v + 1),
    "dict": lambda n, x: x * signed(n.kept["w"]),
    "in a list": lambda n, x: x * torch.stack([signed(n.w), n.v]).prod(0),
    "constant": lambda n, x: x * Pair.apply(n.w, leaf().detach())[1],
    "outputs": lambda n, x: x * Pair.apply(n.w, n.v)[0] + Pair.apply(n.w, n.v)[1],
    "chain": lambda n, x: x * signed(signed(n.w).exp()),
    "nested": lambda n, x: x * Nested.apply(n.w),
    "without gradient": lambda n, x: x * n.w + signed(n.v.detach()),
    "checkpoint": lambda n, x: checkpoint(lambda y: y * signed(n.w), x, use_reentrant=False),
    "checkpoint of a parameter": lambda n, x: (
        x * checkpoint(lambda w: signed(w).exp(), n.w, use_reentrant=False)
    ),
    "older checkpoint": lambda n, x: (
        x * checkpoint(lambda w: signed(w).exp(), n.w, use_reentrant=True)
    ),
    "hook": lambda n, x: x * hooked(n.w * 2),
    "hook of a parameter": lambda n, x: x * hooked(n.w) * hooked(n.kept["w"]).detach(),
    "hook in place": in_place_hook,
    "hooks of modules": module_hooks,
    "gradient within": gradient_within,
    "plain gradient within": plain_gradient_within,
    "backward within": backward_within,
}


def images() -> T:
    return torch.linspace(0, 40, 2 * 3 * 5 * 4, dtype=torch.float64).sin().view(2, 3, 5, 4) + 0.3


def gradients(net: nn.Module, y: T, twice: bool) -> list[T | None]:
    loss = y.square().mean() + y.mean()
    if not twice:
        loss.backward()
    else:
        parameters = list(net.parameters())
        found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        terms = [g.square().sum() for g in found if g is not None and g.requires_grad]
        sum(terms, loss).backward()
    return [None if p.grad is None else full(p.grad) for p in net.parameters()]


def full(x: T) -> T:
    return getattr(x, "full_tensor", lambda: x)()


@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=[2, 3], transports=("loopback",))
def test_gradients_are_full(P_world: Partition, replicate: bool) -> None:
    workers = P_world.create_partition_inclusive([0, P_world.size - 1])
    P_x = workers.create_cartesian_topology_partition((1, 1, 2, 1))
    failures: list[str] = []
    for name, way in WAYS.items():
        # Torch's older checkpoint has no double backward.
        is_twice_too = P_world.size == 2 and replicate and name != "older checkpoint"
        for twice in (False, True) if is_twice_too else (False,):
            alone = Network(way)
            expected = alone(images())
            wanted = gradients(alone, expected, twice)
            net: Any = gpudist.distribute(Network(way), P_x, replicate_parameters=replicate)
            y = net(gpudist.scatter(images(), P_x))
            found = gradients(net, y, twice)
            if not P_x.active:
                continue
            alike = [torch.allclose(y.full_tensor(), expected)]
            for a, b in zip(found, wanted, strict=True):
                alike.append(a is b if a is None or b is None else torch.allclose(a, b))
            if not all(alike):
                failures.append(f"{name}, {'twice' if twice else 'once'}: {alike}")
    assert not failures, "\n".join(failures)


def retained(n: Network, x: T) -> T:
    w = n.w * 2
    n.w.retain_grad()  # does nothing, as for a leaf
    w.retain_grad()
    return x * w


REFUSED: dict[str, tuple[Callable[[Network, T], Any], str]] = {
    "vmap": (lambda n, x: x * torch.func.vmap(Signed.apply)(n.w), r"Signed\.apply: .*outside"),
    "grad": (
        lambda n, x: x * torch.func.grad(lambda w: Signed.apply(w).square().sum())(n.w),
        r"Signed\.apply: within a transform of torch\.func",
    ),
    "retain_grad": (retained, r"retain_grad: .* \[3, 1, 1\] .* x\.register_hook\(hook\)"),
    "in place": (lambda n, x: x * InPlace.apply(n.w * 1), r"InPlace\.apply: .*return a new tensor"),
}


@distributed(ranks=2, transports=("loopback",))
def test_terms_that_a_user_would_see_raise(P_world: Partition) -> None:
    P_x = P_world.grid(1, 1, 2, 1)
    for way, text in REFUSED.values():
        net: Any = gpudist.distribute(Network(way), P_x)
        with pytest.raises(ConversionError, match=text):
            net(gpudist.scatter(images(), P_x))


@pytest.mark.parametrize("name", ["parameter", "hook"])
@distributed(ranks=2, transports=("loopback",))
def test_recorded_graphs_refuse_them(P_world: Partition, name: str) -> None:
    net: Any = gpudist.distribute(Network(WAYS[name]), P_world.grid(1, 1, 2, 1))
    words = r"(Signed\.apply: a recorded graph|register_hook: a graph calls no hooks).*network"
    with pytest.raises(ConversionError, match=words):
        gpudist.compiled(net, gpudist.scatter(images(), net.P_x), backend="eager")
