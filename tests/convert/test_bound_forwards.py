"""Changes of a network between two of its calls, after its modules have bound their forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist.convert.converted import conversion_of
from gpudist.errors import ConversionError
from tests.pool import distributed

T = torch.Tensor
SHAPE = (2, 2, 16, 8)


class Net(nn.Module):
    """Convolution, batch norm, pool and more, any of which a test may change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act: nn.Module = nn.ReLU()
        self.pool: Any = nn.MaxPool2d(2)
        self.head: nn.Module = nn.Conv2d(4, 2, 1)
        self.copies = False

    def forward(self, x: T) -> T:
        conv = self.conv
        if self.copies:
            conv = copy.deepcopy(conv)
            conv.bias = nn.Parameter(torch.ones(4, dtype=torch.float64))
            twin = copy.copy(self.conv)
            twin.padding = twin.dilation = (2, 2)
            assert "forward" not in {**vars(conv), **vars(twin)}
            y = copy.copy(conv)(x) + self.conv(x) + twin(x)
        else:
            y = conv(x)
        return self.head(self.pool(self.act(input=self.norm(y))))


def _assign_state(net: Any) -> None:
    net.load_state_dict({k: v.clone() + 1 for k, v in net.state_dict().items()}, assign=True)


def _replace_dicts(net: Any) -> None:
    net.norm._buffers = {k: v.clone() + 1 for k, v in net.norm._buffers.items()}
    net.conv._parameters = {k: nn.Parameter(p.detach() + 1) for k, p in net.conv.named_parameters()}


def _without_bias(net: Any) -> None:
    del net.conv.bias
    net.conv.register_parameter("bias", None)


def _patch_instance(net: Any) -> None:
    conv = net.conv
    conv.forward = lambda x: F.conv2d(x, conv.weight, conv.bias, padding=1) * 3


def _change_list(net: Any) -> None:
    net.pool.kernel_size = [2, 2]
    net.register_forward_hook(lambda *_: net.pool.kernel_size.__setitem__(0, 4))


def _give_bias(net: Any) -> None:
    net.head = nn.Conv2d(4, 2, 1, bias=False).double()
    biases = iter([None, torch.ones(2, dtype=torch.float64)])
    net.norm.register_forward_hook(lambda *_: net.head._parameters.update(bias=next(biases)))


def _tie(net: Any) -> None:
    net.act = nn.Conv2d(4, 4, 1, bias=False)
    twin = nn.Conv2d(4, 4, 1, bias=False)
    twin.weight = net.act.weight = nn.Parameter(torch.full((4, 4, 1, 1), 0.1, dtype=torch.float64))
    net.pool = nn.Sequential(twin, nn.MaxPool2d(2))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda net: None,
    "evaluation": lambda net: net.eval(),
    "one module in evaluation": lambda net: net.norm.eval(),
    "attributes": lambda net: vars(net.norm).update(eps=0.5, momentum=0.5),
    "a size": lambda net: vars(net.pool).update(kernel_size=4, stride=4),
    "a list as a size": lambda net: setattr(net, "pool", nn.AdaptiveAvgPool2d([2, 2])),  # pyright: ignore
    "single precision": lambda net: net.float(),
    "frozen": lambda net: net.conv.requires_grad_(False),
    "data": lambda net: setattr(net.conv.bias, "data", net.conv.bias.data + 1),
    "a parameter": lambda net: setattr(net.conv, "weight", nn.Parameter(net.conv.weight * 2)),
    "the dict of parameters": lambda net: net.conv._parameters.update(
        bias=nn.Parameter(torch.ones(4, dtype=torch.float64))
    ),
    "other dicts": _replace_dicts,
    "no bias": _without_bias,
    "assigned state": _assign_state,
    "no momentum": lambda net: setattr(net.norm, "momentum", None),
    "no attribute": lambda net: vars(net.conv).pop("in_channels"),
    "a method of an instance": lambda net: vars(net.conv).update(
        _conv_forward=lambda x, weight, bias: F.conv2d(x, weight * 2, bias, padding=1)  # pyright: ignore
    ),
    "a list that changes": _change_list,
    "a bias within calls": _give_bias,
    "dicts within calls": lambda net: net.register_forward_hook(
        lambda *_: vars(net.conv).update(_parameters=dict(net.conv._parameters))
    ),
    "no moments": lambda net: vars(net.norm).update(track_running_stats=False),
    "another module": lambda net: setattr(net, "head", nn.Conv2d(4, 3, 1, bias=False).double()),
    "another class": lambda net: setattr(net.act, "__class__", nn.Tanh),
    "a hook": lambda net: net.conv.register_forward_hook(lambda m, a, y: y * 2),
    "a forward of an instance": _patch_instance,
    "shared parameters": _tie,
    "weight in an attribute": lambda net: nn.utils.weight_norm(net.conv),
    "weight norm": lambda net: nn.utils.parametrizations.weight_norm(net.conv),
    "copies within the forward": lambda net: setattr(net, "copies", True),
    "a copy": copy.deepcopy,
}


def _steps(net: Any, x: T, count: int) -> list[T]:
    dtype = next(net.parameters()).dtype
    for _ in range(count):
        net.zero_grad()
        y = net(x.to(dtype))
        y.square().sum().backward()
    y = y.full_tensor() if hasattr(y, "full_tensor") else y
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [z.detach().clone() for z in (y, *gradients, *net.buffers())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_replicated", [True, False])
@distributed(ranks=2, transports=["loopback"])
def test_a_changed_network_is_the_sequential_one(P_world: Any, is_replicated: bool) -> None:
    P_x = P_world.grid(1, 1, 2, 1)
    for name, change in CHANGES.items():
        if not is_replicated and name in PARTS_STAY:
            continue
        torch.manual_seed(0)
        alone = Net().double()
        net = gpudist.distribute(copy.deepcopy(alone), P_x, replicate_parameters=is_replicated)
        x = torch.randn(SHAPE)
        found = []
        for network, block in ((alone, x), (net, x.chunk(2, 2)[P_world.rank or 0])):
            _steps(network, block, 3)
            torch.manual_seed(1)
            changed = change(network)
            network = changed if isinstance(changed, Net) else network
            found.append(_steps(network, block, 2))
        if is_replicated:
            assert len(found[0]) == len(found[1]), name
        for mine, its in zip(found[1], found[0], strict=False):
            mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine  # pyright: ignore
            eps = 1e-3 if mine.dtype == torch.float32 else 1e-9
            assert mine.dtype == its.dtype and torch.allclose(mine, its, eps, eps), name
        assert not any("forward" in vars(m) for m in net.modules() if "instance" not in name), name


# What the owner of a parameter alone would change.
PARTS_STAY = {
    "data", "a parameter", "the dict of parameters", "other dicts", "no bias", "assigned state",
    "shared parameters", "weight norm", "copies within the forward", "another module",
    "a bias within calls", "dicts within calls", "weight in an attribute",
}  # fmt: skip


@distributed(ranks=2, transports=["loopback"])
def test_converted_parameters_leave_their_memory(P_world: Any) -> None:
    net = gpudist.distribute(Net(), P_world.grid(1, 1, 2, 1))
    x = torch.randn(2, 2, 8, 8) + P_world.rank
    net(x).sum().backward()
    before = net.conv.weight.untyped_storage()
    count = torch._C._storage_Use_Count(before._cdata)  # pyright: ignore
    assert count > 2
    net.double()
    assert torch._C._storage_Use_Count(before._cdata) == 1  # pyright: ignore


@distributed(ranks=2, transports=["loopback"])
def test_warm_calls_do_not_reach_the_modules_own_forwards(P_world: Any) -> None:
    net = gpudist.distribute(Net(), P_world.grid(1, 1, 2, 1))
    x = torch.randn(2, 2, 8, 8) + P_world.rank
    for _ in range(2):
        net(x)
    through: list[str] = []
    kept = conversion_of(net)._kept
    assert kept is not None and len(kept.forwards._bound) == 5
    for bound in kept.forwards._bound:
        name, own = type(bound.module).__name__, bound.through

        def listed(*args: Any, name: str = name, own: Any = own, **kwargs: Any) -> Any:
            through.append(name)
            return own(*args, **kwargs)

        bound.through = listed  # pyright: ignore
    net(x)
    # Called with a keyword, it takes the way of its class.
    assert through == ["ReLU"]


class Given(nn.Module):
    """Calls its layer with a weight that is given, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)
        self.given: T | None = None

    def forward(self, x: T) -> T:
        if self.given is None:
            return self.layer(x)
        return torch.func.functional_call(self.layer, {"weight": self.given}, (x,))


@distributed(ranks=2, transports=["loopback"])
def test_a_weight_computed_before_a_warm_call_is_refused(P_world: Any) -> None:
    net = gpudist.distribute(Given(), P_world.grid(1, 1, 2, 1))
    x = torch.randn(1, 2, 4, 4) + P_world.rank
    for _ in range(3):
        net(x).sum().backward()
    net.given = net.layer.weight * 2
    with pytest.raises(ConversionError, match="was computed from the parameter"):
        net(x)
