"""Gradients of parameters that a forward reaches otherwise than as attributes of modules."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpudist
from gpudist import ConversionError, Plan, distribute, sequential
from gpudist.geometry.layout import broadcast
from gpudist.world.partition import Partition
from tests.convert.reaching import WAYS, N, Reaching, double
from tests.convert.training import assert_gradients, assert_whole, loss_of, outputs_of
from tests.nn.compare import assert_equal_to, grid, own_block, random_like_all
from tests.pool import distributed

TOLERANCE = 1e-10
# One way of each kind.
KINDS = ["dict", "closure", "cat beside", "plain einsum", "foreach", "recurrent", "output"]
GATHERS = pytest.mark.filterwarnings("ignore:.*gathered by moving")


def both(P_world: Partition, way: str, workers: int = 0, **options: Any) -> tuple[Any, Reaching]:
    net, alone = (double(Reaching(WAYS[way])) for _ in range(2))
    return distribute(net, grid(P_world, [workers or P_world.size, 1]), **options), alone


def call(net: Any, alone: Any, seed: int = 1, way: str = "") -> None:
    """Compare the outputs of one call, and run both backwards."""
    whole = random_like_all((6, N), seed).requires_grad_()
    expected = outputs_of(alone(whole))
    found = outputs_of(net(own_block(whole, net.P_x)))
    total_alone: Any = 0
    total: Any = 0
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert_whole(b, a, f"{way}: output {i}", TOLERANCE)
        cotangent = random_like_all(a.shape, seed + i)
        total_alone = total_alone + (a * cotangent).sum()
        total = total + loss_of(b, cotangent)
    total_alone.backward()
    total.backward()


def step(net: Any, alone: Any, seed: int = 1, way: str = "") -> None:
    """Compare outputs and gradients of one call."""
    call(net, alone, seed, way)
    if net.P_x.active:
        found = net.learned()
        for name, p in alone.learned().items():
            what = f"{way}: gradient of {name}"
            if p.grad is None:
                assert found[name].grad is None, f"{what}: alone it has none"
            else:
                assert_equal_to(found[name].grad, p.grad, TOLERANCE, what)


@GATHERS
@distributed(ranks=2, transports=["loopback"])
def test_ways(P_world: Partition) -> None:
    for way in WAYS:
        net, alone = both(P_world, way)
        for seed in (1, 2):
            step(net, alone, seed, way)


@GATHERS
@pytest.mark.parametrize("workers", [3, 2])
@distributed(ranks=3, transports=["loopback"])
def test_ways_on_three_ranks(P_world: Partition, workers: int) -> None:
    """All of them work, or one takes no part."""
    for way in KINDS:
        net, alone = both(P_world, way, workers)
        step(net, alone, way=way)


@GATHERS
@distributed(ranks=2, transports=["loopback"])
def test_owned_parameters(P_world: Partition) -> None:
    for way in (*KINDS, "checkpoint", "reentrant checkpoint"):
        net, alone = both(P_world, way, replicate_parameters=False)
        call(net, alone, way=way)
        assert_gradients(net, alone, net.P_x.active, TOLERANCE)
        back: Any = sequential(net)
        assert back.kept["w"] is back.w and torch.equal(back.w, alone.w)


@GATHERS
@distributed(ranks=2, transports=["loopback"])
def test_copies_of_converted_networks(P_world: Partition) -> None:
    for way in KINDS:
        net, alone = both(P_world, way)
        net(own_block(random_like_all((6, N), 1), net.P_x))
        step(copy.deepcopy(net), copy.deepcopy(alone), way=way)


@pytest.mark.parametrize("assign", [False, True])
@distributed(ranks=2, transports=["loopback"])
def test_parameters_that_are_replaced(P_world: Partition, assign: bool) -> None:
    """Load a state, change dtypes, and set new parameters in modules and in dicts."""
    net, alone = both(P_world, "dict")
    doubled = {name: 2 * x for name, x in alone.state_dict().items()}
    for network in (net, alone):
        network.load_state_dict(doubled, assign=assign)
        network.float().double()
    step(net, alone)
    assert_equal_to(net.kept["b"].grad, alone.kept["b"].grad, TOLERANCE, "kept")
    for network in (net, alone):
        network.new = nn.Parameter(3 * network.b.detach())
        network.kept["b"] = network.new
    step(net, alone)
    for network in (net, alone):
        network.kept["b"] = nn.Parameter(4 * network.b.detach())
    step(net, alone)
    assert_equal_to(net.kept["b"].grad, alone.kept["b"].grad, TOLERANCE, "unlisted")


@distributed(ranks=2, transports=["loopback"])
def test_closures_follow_the_converted_network(P_world: Partition) -> None:
    """Compute with its weights, also without gradients, and when the original's are gone."""
    net, alone = both(P_world, "closure")
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
        x = random_like_all((6, N), 1)
        y = net(own_block(x, net.P_x, requires_grad=False))
        assert_whole(y, F.linear(x, 2 * alone.w), "output")
    del alone
    net(own_block(x, net.P_x)).sum().backward()
    assert_equal_to(net.w.grad, x.sum(0).expand(N, N), TOLERANCE, "gradient")


class Adding(nn.Module):
    """Network that takes another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(N))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w + self.w


@distributed(ranks=2, transports=["loopback"])
def test_parameters_as_inputs(P_world: Partition) -> None:
    """The network's own parameter, or another one's, is an input like any other."""
    alone = Adding()
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [2, 1]))
    with torch.no_grad():
        net.w.fill_(3)
        assert_whole(net(torch.ones(1, N), alone.w), torch.full((2, N), 4.0), "output")
    net(torch.ones(1, N), alone.w).sum().backward()
    assert_equal_to(alone.w.grad, torch.full((N,), 2.0), TOLERANCE, "gradient")
    net.w.grad = None
    net(torch.ones(1, N), net.w).sum().backward()
    assert_equal_to(net.w.grad, torch.full((N,), 4.0), TOLERANCE, "gradient of both uses")


class Adapting(nn.Module):
    """Network that makes a parameter in its forward, and learns it there by plain functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fast = nn.Parameter(torch.ones(N, dtype=torch.float64))
        fast.square().sum().backward()
        assert fast.grad is not None
        return x * (fast.detach() - fast.grad) * fast


@distributed(ranks=2, transports=["loopback"])
def test_parameters_made_in_the_forward(P_world: Partition) -> None:
    alone = Adapting()
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [2, 1]))
    whole = random_like_all((6, N), 1)
    assert_whole(net(own_block(whole, net.P_x)), alone(whole).detach(), "output")


class Within(nn.Module):
    """Network around another one, one of whose parameters it also keeps."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.kept = inner, [inner.w]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.kept[0]

    def learned(self) -> dict[str, torch.Tensor]:
        return self.inner.learned()


@distributed(ranks=2, transports=["loopback"])
def test_networks_within_networks(P_world: Partition) -> None:
    net, alone = both(P_world, "dict")
    step(distribute(Within(net), net.P_x), Within(alone))


@distributed(ranks=2, transports=["loopback"])
def test_functional_call_of_the_network(P_world: Partition) -> None:
    """Parameters that are given replace those of modules, not those in a dict."""
    net, alone = both(P_world, "shared module")
    x = random_like_all((6, N), 1)
    given = {name: torch.full_like(p, 0.3) for name, p in alone.named_parameters()}
    losses: list[Any] = []
    for network, block in ((alone, x), (net, own_block(x, net.P_x, requires_grad=False))):
        own = {name: p.clone().requires_grad_() for name, p in given.items()}
        losses.append(own["inner.weight"])
        torch.func.functional_call(network, own, (block,)).square().sum().backward()
    assert_equal_to(losses[1].grad, losses[0].grad, TOLERANCE, "given")
    assert_equal_to(net.kept["inner"].grad, alone.kept["inner"].grad, TOLERANCE, "kept")


class Tied(nn.Module):
    """Layer whose weight is also in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(N, N)
        self.kept: list[torch.Tensor] = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * F.linear(x, self.kept[0]) + self.kept[0].square().sum()


@distributed(ranks=2, transports=["loopback"])
def test_split_weights(P_world: Partition) -> None:
    alone = Tied().double()
    plan = Plan()
    plan.split_weight("layer", (1, 2, 1))
    net: Any = distribute(copy.deepcopy(alone), grid(P_world, [2, 1]), plan)
    assert net.layer.weight.to_local().shape == (2, N)
    call(net, alone)
    assert_gradients(net, alone, True, TOLERANCE)
    back: Any = sequential(net)
    assert back.kept[0] is back.layer.weight and torch.equal(back.kept[0], alone.kept[0])
    alone.kept.clear()
    alone.add_module("other", nn.Linear(N, N))
    alone.get_submodule("other").weight = alone.layer.weight
    with pytest.raises(ConversionError, match=r"layer: .* modules \['other'\] use them too"):
        distribute(copy.deepcopy(alone), grid(P_world, [2, 1]), plan)


class ToGlobal(Tied):
    def forward(self, x: Any) -> Any:
        if not isinstance(x, gpudist.GlobalTensor):
            return x @ self.kept[0]
        return x @ gpudist.to_global(self.kept[0], x.placement, [broadcast] * x.placement.axes)

    def learned(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())


@distributed(ranks=2, transports=["loopback"])
def test_parameter_made_global(P_world: Partition) -> None:
    alone = ToGlobal().double()
    step(distribute(copy.deepcopy(alone), grid(P_world, [2, 1])), alone)


class ComputedBefore(Tied):
    """Its tied weight is a view of a parameter, made before the network is distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.view = self.layer.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.view


class ByThread(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.kept[0] * 2))
        thread.start()
        thread.join()
        return x @ found[0]


class ByTransform(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.func.vmap(torch.sin)(self.kept[0])


class Left(Tied):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, torch.func.vmap(torch.sin)(self.kept[0])


class Later(Tied):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kept[1]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "before the conversion": (ComputedBefore, r"matmul: .* 'layer.weight' before this call"),
    "another thread": (ByThread, r"matmul: .* the parameter 'layer.weight' before this call"),
    "transform": (ByTransform, r"line \d+\).*\[4, 4\] was .* 'layer.weight' .* \(torch.func"),
    "output": (Left, r"output: a tensor .* the parameter 'layer.weight'"),
    "between calls": (Later, r"the parameter 'layer.weight' before this call .* detach"),
}


@distributed(ranks=2, transports=["loopback"])
def test_tensors_that_pass_no_copy(P_world: Partition) -> None:
    """Raise in the forward, on both ranks; without gradients, there is nothing to refuse."""
    for kind, (make, message) in REFUSED.items():
        net: Any = distribute(make(), grid(P_world, [2, 1]))
        if kind == "between calls":
            net.kept.append(net.layer.weight.tanh())
        with pytest.raises(ConversionError, match=message):
            net(torch.ones(3, N))
        with torch.no_grad():
            net(torch.ones(3, N))


@distributed(ranks=2, transports=["host"], timeout_s=300)
def test_recorded_graphs(P_world: Partition) -> None:
    """Follow the parameters' values, and refuse those that no module lists."""
    net, alone = both(P_world, "several")
    fast: Any = gpudist.compiled(net, backend="eager")
    fast.P_x, fast.learned = net.P_x, net.learned
    step(fast, alone)
    with torch.no_grad():
        # The closure refers to a parameter of the network alone.
        for p in [*net.learned().values(), *alone.learned().values()]:
            p.mul_(2)
    step(fast, alone)
    net, _ = both(P_world, "dict")
    net.kept["b"] = nn.Parameter(net.b.detach())
    with pytest.raises(ConversionError, match=r"compiled: a parameter of shape \[4\] is not among"):
        gpudist.compiled(net, own_block(random_like_all((6, N), 1), net.P_x), backend="eager")


@GATHERS
def test_plans_reach_them_too() -> None:
    for way in (*KINDS, "unlisted layer", "plain leaf"):
        plan = gpudist.plan_of(Reaching(WAYS[way]), (2, 1), (6, N))
        assert plan.rows, way
