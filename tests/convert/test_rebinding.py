"""Forwards that replace parameters and buffers, with torch on plain tensors as the judge."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

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
KINDS = {"w": "trainable", "f": "frozen", "b": "buffer"}
TOLERANCE = 1e-10
GATHERS = pytest.mark.filterwarnings("ignore:.*gathered by moving")


def new(part: nn.Module, name: str, value: Any) -> Any:
    """What a module registers under this name."""
    return value if name == "b" else nn.Parameter(value, requires_grad=name == "w")


def by_delete(part: Any, name: str, value: Any) -> None:
    delattr(part, name)
    getattr(part, "register_buffer" if name == "b" else "register_parameter")(
        name, new(part, name, value)
    )


def by_data(part: Any, name: str, value: Any) -> None:
    getattr(part, name).data = value


def by_data_of_data(part: Any, name: str, value: Any) -> None:
    x = getattr(part, name)
    x.data = torch.lerp(x.data, value.data, 0.5).clamp(-1, 1)


def by_set(part: Any, name: str, value: Any) -> None:
    with torch.no_grad():
        getattr(part, name).set_(value)


def by_swap(part: Any, name: str, value: Any) -> None:
    torch.utils.swap_tensors(getattr(part, name), new(part, name, value.clone()))


def by_dict(part: Any, name: str, value: Any) -> None:
    (part._buffers if name == "b" else part._parameters)[name] = new(part, name, value)


def by_rename(part: Any, name: str, value: Any) -> None:
    tensors = part._buffers if name == "b" else part._parameters
    tensors["renamed"] = tensors.pop(name)
    setattr(part, name, (value * part.renamed).detach())


def by_second_name(part: Any, name: str, value: Any) -> None:
    if name == "b":
        part.register_buffer("second", part.b)
    else:
        part.second = getattr(part, name)
    part.third = (getattr(part, name) * value).detach()


def by_register(part: Any, name: str, value: Any) -> None:
    part.register_buffer("second", value)
    if name != "b":
        part.register_parameter("third", new(part, name, value))


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
    "setattr": lambda part, name, value: setattr(part, name, new(part, name, value)),
    **{name[3:]: way for name, way in list(globals().items()) if name.startswith("by_")},
}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shape = (1, *SHAPE[1:3], 1)
        self.w = nn.Parameter(random_like_all(shape, 1))
        self.f = nn.Parameter(random_like_all(shape, 2), requires_grad=False)
        self.register_buffer("b", random_like_all(shape, 3))

    def forward(self, x: Any) -> Any:
        y = x * self.w + x.tanh() * self.f + self.b
        for name in ("second", "third"):
            y = y + getattr(self, name, 0)
        return y


class Rebinding(nn.Module):
    """Its first call rebinds a tensor of a module, or each call does."""

    def __init__(self, way: str, name: str, is_global: bool) -> None:
        super().__init__()
        self.layer, self.part = nn.Conv2d(3, 3, 3, padding=1), Part()
        self.way, self.name, self.is_global, self.calls = way, name, is_global, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = self.layer(x)
        if self.calls == 1 or self.way in ("data", "data_of_data", "setattr", "set"):
            value = random_like_all((1, *SHAPE[1:3], 1), self.calls)
            if self.is_global:
                value = x.detach().mean((0, 3), keepdim=True)
            WAYS[self.way](self.part, self.name, value)
        return self.part(x)


class Case(NamedTuple):
    way: str
    name: str
    is_global: bool


def cases() -> Iterator[Case]:
    for way, name, is_global in product(WAYS, KINDS, (False, True)):
        yield Case(way, name, is_global)


def compare(P_world: Partition, case: Case, options: Any) -> str:
    torch.manual_seed(5)
    alone = Rebinding(*case).double()
    net = gpudist.distribute(
        copy.deepcopy(alone), grid(P_world, [1, 1, P_world.size, 1]), **options
    )
    parted = {name for name, p in net.named_parameters() if isinstance(p, GlobalParameter)}
    for seed in range(3):
        x = random_like_all(SHAPE, seed)
        try:
            expected = alone(x)
            expected.square().sum().backward()
        except (RuntimeError, KeyError, AttributeError, TypeError):
            return "torch refuses"
        try:
            y = net(own_block(x, net.P_x))
            y.square().sum().backward()
        except GpudistError as error:
            return f"refused: {error}"
        assert_whole(y, expected, "output", TOLERANCE)
        named = dict(net.named_parameters())
        assert list(named) == [name for name, _ in alone.named_parameters()]
        assert all(isinstance(named[name], GlobalParameter) for name in parted & {*named})
        assert not any(type(x) is not torch.Tensor for x in net.buffers())
        for name, p in alone.named_parameters():
            found = named[name]
            assert found.requires_grad == p.requires_grad
            assert (found.grad is None) == (p.grad is None), name
            if p.grad is not None:
                whole = found.grad
                if isinstance(found, GlobalParameter):
                    whole = found.grad.full_tensor()
                assert_equal_to(whole, p.grad, TOLERANCE, name)
        state = full_state_dict(net, to_all=True)
        assert list(state) == list(alone.state_dict())
        for name, x in alone.state_dict().items():
            assert_equal_to(state[name], x, TOLERANCE, name)
    return "right"


@GATHERS
@pytest.mark.parametrize("replicate", [True, False])
@distributed(ranks=2, transports=["loopback"], timeout_s=200)
def test_rebinding(P_world: Partition, replicate: bool) -> None:
    counts: dict[str, int] = {}
    for case in cases():
        try:
            result = compare(P_world, case, {"replicate_parameters": replicate})
        except Exception as error:
            result = f"wrong: {type(error).__name__}: {error}"
        P_world.barrier()
        if P_world.rank == 0 and result != "right":
            print(replicate, case, result[:300], flush=True)
        kind = result.partition(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
    if P_world.rank == 0:
        print(counts)
    assert "wrong" not in counts
