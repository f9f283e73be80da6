"""Ways by which a forward reaches a parameter, other than as an attribute of its module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

T = torch.Tensor
N = 4
Way = Callable[[Any, T], Any]


class Scaled(torch.autograd.Function):
    """Product whose backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> T:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        (g,) = gradients
        return g * w, g * x


class Doubled(nn.Module):
    def forward(self, x: T) -> T:
        return 2 * x


class Reaching(nn.Module):
    """Network that keeps its parameters in many places, and uses them by one way."""

    tied: T

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.w = w = nn.Parameter(torch.randn(N, N))
        self.v = nn.Parameter(torch.randn(N, N))
        self.b = nn.Parameter(torch.randn(N))
        self.inner = nn.Linear(N, N)
        self.halved = parametrize.register_parametrization(nn.Linear(N, N), "weight", Doubled())
        self.lstm = nn.LSTM(N, N, batch_first=True)
        self.kept: dict[str, Any] = {"w": self.w, "v": self.v, "b": self.b}
        self.kept |= {"inner": self.inner.weight, "deep": [{"w": (self.w,)}]}
        self.listed, self.pair = [self.w, self.v], (self.w, self.b)
        self.holder = SimpleNamespace(w=self.w)
        self.closure = lambda x: F.linear(x, w)
        self.linear = partial(F.linear, weight=self.w, bias=self.b)
        self.__dict__["tied"] = self.inner.weight
        self.unlisted_layers = [nn.Linear(N, N)]
        self.unlisted = {"u": nn.Parameter(torch.randn(N))}
        self.plain = torch.randn(N, requires_grad=True)
        self.way = way

    def forward(self, x: T) -> Any:
        return self.way(self, x)

    def learned(self) -> dict[str, T]:
        others = {"u": self.unlisted["u"], "plain": self.plain}
        others |= dict(self.unlisted_layers[0].named_parameters(prefix="layer"))
        return {**dict(self.named_parameters()), **others}


def double(network: Reaching) -> Reaching:
    """Convert all that it learns to float64, in place."""
    for p in network.learned().values():
        p.data = p.data.double()
    return network


def _attention(n: Reaching, x: T) -> T:
    q = x.unsqueeze(0)
    w = torch.cat([n.kept["w"], n.kept["v"], n.kept["w"] * 2])
    return F.multi_head_attention_forward(
        q, q, q, N, 2, w, None, None, None, False, 0.0, n.kept["inner"], n.kept["b"],
        need_weights=False,
    )[0][0]  # fmt: skip


def _attention_in_parts(n: Reaching, x: T) -> T:
    q, (w, v) = x.unsqueeze(0), n.listed
    return F.multi_head_attention_forward(
        q, q, q, N, 2, None, torch.cat([n.b, n.b, n.b]), None, None, False, 0.0, n.kept["inner"],
        n.kept["b"], need_weights=False, use_separate_proj_weight=True, q_proj_weight=w,
        k_proj_weight=v, v_proj_weight=w,
    )[0][0]  # fmt: skip


def _gradient_within(n: Reaching, x: T) -> T:
    y = F.linear(x.tanh(), n.kept["w"]).square().sum()
    (gradient,) = torch.autograd.grad(y, n.kept["w"], create_graph=True)
    return F.linear(x, gradient)


def _plain_gradient_within(n: Reaching, x: T) -> T:
    (gradient,) = torch.autograd.grad(n.kept["w"].pow(3).sum(), n.kept["w"], create_graph=True)
    return F.linear(x, gradient)


def _called_twice(n: Reaching, x: T) -> T:
    return n.inner(n.inner(x).tanh()) @ n.kept["inner"] + F.linear(x, n.tied)


def _checkpointed(reentrant: bool, n: Reaching, x: T) -> Any:
    w = n.kept["w"]
    by_closure = checkpoint(lambda y: F.linear(y, w).tanh(), x, use_reentrant=reentrant)
    return checkpoint(F.linear, by_closure, n.kept["v"], n.kept["b"], use_reentrant=reentrant)


def _in_place(n: Reaching, x: T) -> T:
    with torch.no_grad():
        n.kept["w"] *= 0.5
        n.kept["v"].clamp_(-1, 1)
    assert n.kept["w"] is n.holder.w
    return F.linear(F.linear(x, n.kept["w"]), n.kept["v"])


def _functional(n: Reaching, x: T) -> T:
    given = {"weight": n.kept["w"], "bias": n.kept["b"]}
    return torch.func.functional_call(n.inner, given, (x,))


def _hook(n: Reaching, x: T) -> T:
    handle = n.inner.register_forward_hook(lambda module, args, y: y * n.kept["b"])
    try:
        return n.inner(x)
    finally:
        handle.remove()


def _registered_within(n: Reaching, x: T) -> T:
    n.late = nn.Parameter(n.b.detach() * 2)
    return x * n.late.sin() + n.late


def _asks_leaf(n: Reaching, x: T) -> T:
    w = n.kept["w"]
    assert w.is_leaf and w.requires_grad and w.grad_fn is None and w.shape == (N, N)
    assert isinstance(w, nn.Parameter) and list(w.detach().shape) == list(w.data.shape)
    return F.linear(x, w) * w.detach().sum()


WAYS: dict[str, Way] = {
    "dict": lambda n, x: x * n.kept["b"],
    "list": lambda n, x: F.linear(x, n.listed[0]) + x @ n.listed[1],
    "tuple": lambda n, x: F.linear(x, *n.pair),
    "object": lambda n, x: F.linear(x, n.holder.w),
    "nested": lambda n, x: F.linear(x, n.kept["deep"][0]["w"][0]),
    "closure": lambda n, x: n.closure(x),
    "partial": lambda n, x: n.linear(x),
    "keywords": lambda n, x: F.linear(bias=n.kept["b"], weight=n.kept["w"], input=x),
    "layer norm": lambda n, x: F.layer_norm(x, [N], weight=n.kept["b"], bias=n.w[0]),
    "stack": lambda n, x: F.linear(x, torch.stack([n.kept["w"], n.kept["v"]]).prod(0)),
    "cat beside": lambda n, x: torch.cat([x, n.kept["w"], n.v]).tanh(),
    "stack of": lambda n, x: torch.stack([x[0] * 2, n.kept["b"]], dim=0) * x.mean(),
    "einsum": lambda n, x: torch.einsum("bi,oi->bo", x, n.kept["w"]),
    "einsum of a list": lambda n, x: torch.einsum("bi,oi,op->bp", [x, n.kept["w"], n.kept["v"]]),
    "plain einsum": lambda n, x: x @ torch.einsum("ij,jk->ik", [n.kept["w"], n.kept["v"]]),
    "foreach": lambda n, x: x @ sum(torch._foreach_mul([n.kept["w"], n.v], 2.0)),
    "foreach of pairs": lambda n, x: x @ torch._foreach_add(n.listed, [n.v, n.kept["w"]])[0].tanh(),
    "foreach of products": lambda n, x: F.linear(
        x, torch.stack(torch._foreach_tanh([w * 1 for w in n.listed])).prod(0)
    ),
    "product": lambda n, x: x * (n.kept["b"] * 2),
    "reflected": lambda n, x: (2 - n.kept["b"]) / (1 + x.square()),
    "penalty": lambda n, x: (x.sum() + n.kept["w"].square().sum()).view(1),
    "transposed": lambda n, x: x @ n.holder.w.t(),
    "property": lambda n, x: x @ n.holder.w.mT,
    "row": lambda n, x: x * n.kept["w"][1],
    "expanded": lambda n, x: torch.cat([n.kept["b"].expand(2, N), x]),
    "unbound": lambda n, x: sum(x * row for row in n.kept["w"]),
    "where": lambda n, x: torch.where(x > 0, n.kept["b"], x),
    "addmm": lambda n, x: torch.addmm(n.kept["b"], x, n.kept["w"]),
    "of the parameter": lambda n, x: n.kept["b"].mul(x),
    "embedding": lambda n, x: F.embedding(torch.tensor([0, 2, 2]), n.kept["w"]).sum(0) * x,
    "bilinear": lambda n, x: F.bilinear(x, x, torch.stack(n.listed), n.kept["b"][:2]),
    "attention": _attention,
    "attention in parts": _attention_in_parts,
    "recurrent": lambda n, x: n.lstm(x.unsqueeze(1))[0],
    "parametrized": lambda n, x: n.halved(x) + F.linear(x, n.halved.weight),
    "shared module": _called_twice,
    "functional call": _functional,
    "hook": _hook,
    "function on plain tensors": lambda n, x: x * Scaled.apply(n.kept["b"], n.w[0]),
    "function": lambda n, x: Scaled.apply(x, n.kept["b"].expand(x.shape)),
    "checkpoint": partial(_checkpointed, False),
    "reentrant checkpoint": partial(_checkpointed, True),
    "gradient within": _gradient_within,
    "plain gradient within": _plain_gradient_within,
    "vmap": lambda n, x: x @ torch.func.vmap(lambda row: row * n.kept["b"])(n.w),
    "in place": _in_place,
    "questions": _asks_leaf,
    "without gradient": lambda n, x: x * n.kept["b"].detach() + n.kept["w"].data.sum(),
    "output": lambda n, x: (x * 2, n.kept["b"]),
    "unlisted layer": lambda n, x: n.unlisted_layers[0](x).tanh(),
    "unlisted parameter": lambda n, x: x * n.unlisted["u"].sin(),
    "plain leaf": lambda n, x: x * n.plain + n.plain.square(),
    "several": lambda n, x: (
        n.closure(x) @ torch.stack(n.listed).prod(0) + n.unlisted["u"] * n.plain
    ),
    "registered within": _registered_within,
    "made within": lambda n, x: x * nn.Parameter(n.kept["b"].detach()) * n.b,
}
