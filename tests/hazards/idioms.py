"""Idioms of hand-written forwards, as words of random programs: :mod:`tests.hazards.vocabulary`.

Type tests, arithmetic with shapes, containers, modules that share weights, parametrizations, hooks,
early returns, and branches without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.hazards.programs import NAMES, Drawing
from tests.hazards.vocabulary import Operation, Shape

IDIOMS: list[Operation] = []


def idiom(operation: Operation) -> Operation:
    IDIOMS.append(operation)
    return operation


@dataclass
class Features:
    """An output of a backbone."""

    last: torch.Tensor
    others: tuple[torch.Tensor, ...] = ()
    count: int = 0


class Halved(nn.Module):
    """A parametrization: the weight is half of what is learned."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def halved(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Halved())


def tied(layer: Any, other: Any) -> Any:
    """Return ``other`` with the weight of ``layer``."""
    other.weight = layer.weight
    return other


def hooked(layer: nn.Module) -> nn.Module:
    """Return ``layer`` with hooks that change its input, its output and its gradient."""
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.1, *args[1:]))
    layer.register_forward_hook(lambda module, args, y: 2 * y)  # pyright: ignore
    layer.register_full_backward_hook(lambda module, gx, gy: (0.5 * gx[0],))  # pyright: ignore
    return layer


def watched(layer: Any) -> Any:
    """Return ``layer`` with a weight whose gradient a hook halves."""
    layer.weight.register_hook(lambda g: g / 2)
    return layer


NAMES.update(
    Features=Features,
    checkpoint=checkpoint,
    halved=halved,
    hooked=hooked,
    tied=tied,
    watched=watched,
    weight_norm=parametrizations.weight_norm,
)


def _code_of_a_layer_that_keeps(s: Shape, d: Drawing) -> str:
    if 3 <= len(s) <= 5 and d.pick(True, False):
        n, k = len(s) - 2, d.pick(1, 3)
        return f"nn.Conv{n}d({s[1]}, {s[1]}, {k}, padding={k // 2})"
    return f"nn.Linear({s[-1]}, {s[-1]})"


@idiom
def type_test(d: Drawing, x: str, s: Shape) -> str | list[str]:
    layer = d.attribute(_code_of_a_layer_that_keeps(s, d))
    return d.pick(
        f"{x} * 2 if isinstance({x}, torch.Tensor) else {x}.missing",
        f"{x}.sin() if torch.is_tensor({x}) and not isinstance({x}, (list, tuple)) else -{x}",
        f"{x} + 1 if issubclass(type({x}), torch.Tensor) else {x} - 1",
        f"{x} * (2 if isinstance({layer}.weight, nn.Parameter) else 3) + {layer}({x})",
        f"{x} * (2 if type({layer}.weight) is nn.Parameter else 3) + {layer}({x})",
        f"{x} * (2 if type({layer}) in (nn.Linear, nn.Conv1d) else 3) + {layer}({x})",
        f"{x} * 2 if type({x}.shape) is torch.Size and type({x}.size(0)) is int else {x}",
        f"{x} if {x}.is_floating_point() and {x}.dtype in (torch.float32, torch.float64) else 0",
        f"{x}.relu() if {x}.requires_grad and not {x}.is_leaf else {x}.relu()",
        f"{x}.tanh() if hasattr({x}, 'tanh') and callable({x}.tanh) else {x}",
        [f"OUT = {x} if type({x}) is torch.Tensor else {x}.clone()", "OUT = OUT * 0.5"],
    )


@idiom
def of_shapes(d: Drawing, x: str, s: Shape) -> str | list[str]:
    i = d.dim(s)
    before = ":, " * i
    return d.pick(
        f"{x}.reshape({x}.shape[0], -1)", f"{x} / {x}.size({i})", f"{x}.view(-1, {x}.size(-1))",
        f"{x}[{before}:max({x}.shape[{i}] // 2, 1)]", f"{x} * ({x}.numel() / {x}.shape[{i}] ** 2)",
        f"F.pad({x}, (0, -{x}.shape[-1] % 4))", f"{x}.flatten(0, -2) if {x}.dim() > 1 else {x}",
        [f"n, *rest = {x}.shape", f"OUT = {x}.reshape(n, sum(rest) and -1)"],
        [f"size = list({x}.shape)", f"size[{i}] = 1", f"OUT = {x} + torch.ones(size)"],
        [f"n = {x}.shape[{i}]", f"OUT = {x} * torch.linspace(0, 1, n).reshape([n if k == {i} else 1"
         f" for k in range({x}.ndim)])"],
        [f"OUT = {x} if {x}.shape[{i}] % 2 else {x}.flip({i})", "OUT = OUT * 2"],
        f"{x}.new_zeros({x}.shape) + {x}", f"{x} * len({x}) + {x}.ndim",
    )  # fmt: skip


@idiom
def in_containers(d: Drawing, x: str, s: Shape) -> str | list[str]:
    y, i = d.other(s) or x, d.dim(s)
    d._uses.append(y)
    return d.pick(
        f"sum({{'a': {x}, 'b': {y} * 2}}.values())", f"torch.cat([t * 2 for t in ({x}, {y})], {i})",
        f"torch.stack([{x}, *[t for t in ({y}, None) if t is not None]]).sum(0)",
        f"Features({x}, ({y},), len({x})).last * 2", f"dict(a={x}, b={y})['b'] + {x}",
        [f"parts = list({x}.unbind({i}))", "parts.reverse()", f"OUT = torch.stack(parts, {i})"],
        [f"kept = [{x}]", f"kept.append(kept[-1].sin() + {y})", f"OUT = torch.cat(kept, dim={i})"],
        ["OUT = 0.0", f"for k, part in enumerate({x}.split(1, {i})):",
         "    OUT = OUT + (k + 1) * part"],
        [f"first, *rest = {x}.chunk(2, {i})", "OUT = torch.cat([*rest, first * 2], "
         f"{i})"],
        [f"found = Features({x})", f"found.others += ({y}, found.last)",
         "OUT = sum(t.tanh() for t in found.others)"],
    )  # fmt: skip


@idiom
def shared(d: Drawing, x: str, s: Shape) -> str | list[str]:
    code = _code_of_a_layer_that_keeps(s, d)
    first = d.attribute(code)
    again, other = d.attribute(first), d.attribute(f"tied({first}, {code})")
    listed = d.attribute(f"nn.ModuleList([{first}, {code}, {first}])")
    last = d.attribute(f"nn.Sequential({first}, nn.Tanh(), {first})")
    weight = d.attribute(f"{first}.weight")
    return d.pick(
        f"{first}({x}) + {again}({x}.sin())", f"{other}({first}({x}).tanh())",
        f"{listed}[0]({x}) + {listed}[1]({listed}[2]({x}))", f"{last}({x})",
        f"{first}({x}) * {weight}.square().mean()", f"{other}({x}) + {weight}.abs().amax()",
        [f"OUT = {x}", f"for layer in {listed}:", "    OUT = layer(OUT).sin() + OUT"],
        [f"for n, p in {other}.named_parameters():", f"    OUT = {first}({x}) + p.mean()"],
    )  # fmt: skip


@idiom
def with_hooks(d: Drawing, x: str, s: Shape) -> str | list[str]:
    code = _code_of_a_layer_that_keeps(s, d)
    one, two = d.attribute(f"hooked({code})"), d.attribute(f"watched({code})")
    return d.pick(
        f"{one}({x})", f"{two}({x})", f"{one}({two}({x}))", f"checkpoint({one}, {x}, "
        "use_reentrant=False)",
        [f"OUT = {x} * 1.0", "if OUT.requires_grad:", "    OUT.register_hook(lambda g: g * 0.5)"],
        [f"OUT = {x}.sin()", "if OUT.requires_grad:", "    OUT.retain_grad()"],
    )  # fmt: skip


@idiom
def parametrized(d: Drawing, x: str, s: Shape) -> str:
    code = _code_of_a_layer_that_keeps(s, d)
    one, two = d.attribute(f"halved({code})"), d.attribute(f"weight_norm({code})")
    both = d.attribute(f"halved(halved({code}))")
    return d.pick(
        f"{one}({x})", f"{two}({x})", f"{both}({x})", f"{one}({x}) + {one}.weight.mean()",
        f"{one}({x}) * {one}.parametrizations.weight.original.square().mean()",
    )  # fmt: skip


@idiom
def without_graph(d: Drawing, x: str, s: Shape) -> str | list[str]:
    i = d.dim(s)
    seen = d.buffer("torch.zeros(())")
    return d.pick(
        f"{x} - {x}.detach().amax({i}, keepdim=True)", f"{x} + ({x}.sign() - {x}).detach()",
        ["with torch.no_grad():", f"    scale = {x}.abs().mean() + 1", f"OUT = {x} / scale"],
        ["with torch.set_grad_enabled(not self.training):", f"    shift = {x}.mean({i}, True)",
         f"OUT = {x} - shift"],
        ["with torch.no_grad():", f"    {seen}.mul_(0.9).add_({x}.mean() * 0.1)",
         f"OUT = {x} - {seen}"],
        ["if self.training:", f"    {seen}.copy_({x}.detach().mean())",
         f"OUT = {x} * (1 + {seen})"],
        ["with torch.enable_grad():", f"    OUT = {x} * 2"],
        f"checkpoint(lambda t: t.sin() * 2, {x}, use_reentrant=False)",
        f"checkpoint(lambda t: (t * t).tanh(), {x}, use_reentrant=True)",
    )  # fmt: skip


@idiom
def rebound(d: Drawing, x: str, s: Shape) -> list[str]:
    """Buffers and data that a forward assigns, and work in place on views and on copies."""
    i, seen = d.dim(s), d.buffer("torch.zeros(())")
    layer = d.attribute(_code_of_a_layer_that_keeps(s, d))
    return d.pick(
        [f"{seen} = {seen} * 0.9 + {x}.detach().mean()", f"OUT = {x} - {seen}"],
        [f"{seen}.data = {x}.detach().mean()", f"OUT = {x} + {seen}"],
        [f"{layer}.weight.data = {layer}.weight.data.clamp(-0.1, 0.1)", f"OUT = {layer}({x})"],
        [f"{layer}.bias.data.mul_(0.5)", f"OUT = {layer}({x})"],
        [f"OUT = {x} * 1.0", "flat = OUT.transpose(0, -1).reshape(-1)", "flat.mul_(2)",
         "OUT = OUT + flat.mean()"],
        [f"OUT = {x} * 1.0", "OUT.detach().mul_(2)", "OUT = OUT.sin()"],
        [f"OUT = F.dropout({x} * 1.0, 0.5, training=False)", "OUT.mul_(2)"],
        [f"n = torch.tensor({x}.shape[{i}] // 2 + 1)", f"OUT = {x}[{':, ' * i}:n]"],
    )  # fmt: skip


@idiom
def decided(d: Drawing, x: str, s: Shape) -> list[str]:
    """Control flow by values, by shapes and by the mode, also out of the forward."""
    i = d.dim(s)
    return d.pick(
        ["if not self.training:", f"    return {x}", f"OUT = {x} * 2"],
        [f"if {x}.shape[{i}] > 99:", f"    return {x}, {x}", f"OUT = {x} / 2"],
        [f"if {x}.abs().amax() > 1e6:", "    return None", f"OUT = {x}.sin()"],
        [f"OUT = {x}", "while OUT.abs().sum() < 1:", "    OUT = OUT * 2 + 1"],
        ["try:", f"    OUT = {x}.view(7, 11, 13)", "except RuntimeError:", f"    OUT = {x}.cos()"],
        [f"OUT = {x} if {x}.isfinite().all() else torch.zeros_like({x})", "OUT = OUT + 1"],
        [f"count = int(({x} > -1e9).sum())", f"OUT = {x} * (count / {x}.numel())"],
        [f"OUT = {x}.clone()", f"for k in range({x}.shape[{i}]):",
         f"    OUT[{':, ' * i}k] += k"],
        [f"OUT = {x} * 1.5", f"view = OUT[{':, ' * i}::2]", "view += 1", "view.mul_(0.5)"],
    )  # fmt: skip
