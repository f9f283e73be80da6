"""Forwards that replace parameters and buffers, with torch on plain tensors as the judge."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import gpudist
from gpudist.checkpoint import full_state_dict
from gpudist.errors import GpudistError
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.world.partition import Partition
from tests.convert.training import assert_whole
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

SHAPE = (2, 3, 8, 6)
# Trainable, frozen, and a buffer.
NAMES = ("w", "f", "b")
TOLERANCE = 1e-10


def new(name: str, value: Any) -> Any:
    """Return what a module registers under this name."""
    return value if name == "b" else nn.Parameter(value, requires_grad=name == "w")


def tensors_of(part: nn.Module, name: str) -> dict[str, Any]:
    return part._buffers if name == "b" else part._parameters


def by_setattr(part: Any, name: str, value: Any) -> None:
    setattr(part, name, new(name, value))


def by_delete(part: Any, name: str, value: Any) -> None:
    delattr(part, name)
    register = part.register_buffer if name == "b" else part.register_parameter
    register(name, new(name, value))


def by_data(part: Any, name: str, value: Any) -> None:
    getattr(part, name).data = value


def by_data_of_data(part: Any, name: str, value: Any) -> None:
    x = getattr(part, name)
    x.data = torch.lerp(x.data, value.data, 0.5).clamp(-1, 1)


def by_set(part: Any, name: str, value: Any) -> None:
    with torch.no_grad():
        getattr(part, name).set_(value)


def by_swap(part: Any, name: str, value: Any) -> None:
    torch.utils.swap_tensors(getattr(part, name), new(name, value.clone()))


def by_dict(part: Any, name: str, value: Any) -> None:
    tensors_of(part, name)[name] = new(name, value)


def by_rename(part: Any, name: str, value: Any) -> None:
    tensors = tensors_of(part, name)
    tensors["renamed"] = tensors.pop(name)
    setattr(part, name, (value * part.renamed).detach())


def by_second_name(part: Any, name: str, value: Any) -> None:
    tensors_of(part, name)["second"] = getattr(part, name)
    part.third = (getattr(part, name) * value).detach()


def by_register(part: Any, name: str, value: Any) -> None:
    part.register_buffer("second", value)
    if name != "b":
        part.register_parameter("third", new(name, value))


def by_functional_call(part: Any, name: str, value: Any) -> None:
    part.seen = torch.func.functional_call(part, {name: value}, (value,)).detach()


def by_prune(part: Any, name: str, value: Any) -> None:
    prune.custom_from_mask(part, name, torch.ones(SHAPE[1:3]).tril()[None, :, :, None])


class Sum(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x: Any) -> Any:
        return x.sin() + self.value


def by_parametrize(part: Any, name: str, value: Any) -> None:
    parametrize.register_parametrization(part, name, Sum(value))


def by_weight_norm(part: Any, name: str, value: Any) -> None:
    parametrizations.weight_norm(part, name)


def by_old_weight_norm(part: Any, name: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(part, name)  # pyright: ignore


def by_load(part: Any, name: str, value: Any) -> None:
    part.load_state_dict({name: value}, strict=False, assign=True)


def by_grad(part: Any, name: str, value: Any) -> None:
    if name == "w":
        part.w.grad = value


WAYS: dict[str, Callable[[Any, str, Any], None]] = {
    name.removeprefix("by_"): way for name, way in globals().items() if name.startswith("by_")
}
# Every call rebinds.
REPEATED = ("setattr", "data", "data_of_data", "set")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shape = (1, *SHAPE[1:3], 1)
        self.w = nn.Parameter(random_like_all(shape, 1))
        self.f = nn.Parameter(random_like_all(shape, 2), requires_grad=False)
        self.register_buffer("b", random_like_all(shape, 3))

    def forward(self, x: Any) -> Any:
        y = x * self.w + x.tanh() * self.f + self.b
        return y + getattr(self, "second", 0) + getattr(self, "third", 0)


class Rebinding(nn.Module):
    def __init__(self, way: str, name: str, is_global: bool) -> None:
        super().__init__()
        self.layer, self.part = nn.Conv2d(3, 3, 3, padding=1), Part()
        self.way, self.name, self.is_global, self.calls = way, name, is_global, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = self.layer(x)
        if self.calls == 1 or self.way in REPEATED:
            value = random_like_all((1, *SHAPE[1:3], 1), self.calls)
            if self.is_global:
                value = x.detach().mean((0, 3), keepdim=True)
            WAYS[self.way](self.part, self.name, value)
        return self.part(x)


def compare(P_world: Partition, way: str, name: str, is_global: bool, options: Any) -> str:
    """Compare outputs, gradients and states of three calls; return whether one was refused."""
    alone = Rebinding(way, name, is_global).double()
    P_x = grid(P_world, [1, 1, P_world.size, 1])
    net = gpudist.distribute(copy.deepcopy(alone), P_x, broadcast_parameters=True, **options)
    back: Any = gpudist.sequential(net)
    alone.layer = back.layer
    for seed in range(3):
        x = random_like_all(SHAPE, seed)
        try:
            expected = alone(x)
        except (RuntimeError, TypeError, KeyError):
            return "torch refuses"
        try:
            y = net(own_block(x, P_x))
        except GpudistError:
            return "refused"
        expected.square().sum().backward()
        y.square().sum().backward()
        assert_whole(y, expected, "output", TOLERANCE)
        found: dict[str, Any] = dict(net.named_parameters())
        assert list(found) == [name for name, _ in alone.named_parameters()]
        for name_of_p, p in alone.named_parameters():
            q = found[name_of_p]
            assert (q.requires_grad, q.grad is None) == (p.requires_grad, p.grad is None)
            if p.grad is not None:
                whole: Any = getattr(q.grad, "full_tensor", lambda q=q: q.grad)()
                assert_equal_to(whole, p.grad, TOLERANCE, name_of_p)
        assert all(type(x) in (torch.Tensor, nn.Parameter, GlobalParameter) for x in net.buffers())
        state = full_state_dict(net, to_all=True)
        assert list(state) == list(alone.state_dict())
        for key, x in alone.state_dict().items():
            assert_equal_to(state[key], x, TOLERANCE, key)
    return "right"


@pytest.mark.parametrize(
    ("replicate", "counts"),
    [(True, {"right": 91, "refused": 7}), (False, {"right": 75, "refused": 23})],
)
@distributed(ranks=2, transports=["loopback"], timeout_s=200)
def test_rebinding(P_world: Partition, replicate: bool, counts: dict[str, int]) -> None:
    """Compare all ways; the remedy of a refusal, to assign ``data``, is itself never refused."""
    found: dict[str, list[Any]] = {}
    for case in product(WAYS, NAMES, (False, True)):
        result = compare(P_world, *case, {"replicate_parameters": replicate})
        P_world.barrier()
        found.setdefault(result, []).append(case)
    assert not [case for case in found["refused"] if case[0] in ("data", "set")]
    assert {kind: len(cases) for kind, cases in found.items()} == {**counts, "torch refuses": 4}
