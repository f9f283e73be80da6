"""Recorded graphs of converted networks return the networks' results for the recorded calls."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import gpudist
from gpudist import ConversionError, Plan
from gpudist.sbp import broadcast, split
from gpudist.world.partition import Partition
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed

SHAPE = (2, 1, 9, 8)


class Small(nn.Module):
    """Convolutions with a strided one between, a batch norm, and a head."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 4, 3, stride=2)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = torch.relu(self.norm(self.first(x))) * scale
        y = self.drop(self.down(x))
        return {"features": y, "classes": self.head(y.mean((2, 3))), "scale": scale}


def networks(
    P_world: Partition, p: float = 0.0, plan: Plan | None = None
) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Return two equal converted networks, the whole input and this worker's block."""
    torch.manual_seed(1)
    alone = Small(p).double()
    P_x = grid(P_world, [1, 1, P_world.size, 1])
    whole = random_like_all(SHAPE, 1)
    a, b = (gpudist.distribute(copy.deepcopy(alone), P_x, plan) for _ in range(2))
    return a, b, whole, own_block(whole, P_x)


@pytest.mark.one_in(2)
@distributed(ranks=(2, 3), transports=["host"], timeout_s=300)
def test_graphs_are_the_network(P_world: Partition) -> None:
    a, b, _, block = networks(P_world)
    fast = gpudist.compiled(a, backend="eager")
    for step in range(2):
        xs = [block.clone().requires_grad_() for _ in range(2)]
        results = [fast(xs[0]), b(xs[1])]
        assert results[0]["scale"] == 1.0
        for y in results:
            ((y["features"] ** 2).sum() + y["classes"].sum()).backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad)
        for name in ("features", "classes"):
            mine, theirs = (y[name] for y in results)
            assert mine.sbp == theirs.sbp and mine.shape == theirs.shape, step
            torch.testing.assert_close(mine.to_local(), theirs.to_local())
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    for (name, p), q in zip(a.named_buffers(), b.buffers(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


@distributed(ranks=2, transports=["host"], timeout_s=300)
def test_graphs_follow_a_plan(P_world: Partition) -> None:
    plan = Plan()
    plan.layout("norm", broadcast, at="input")
    plan.layout("", split(2), function="relu", grid=[2])
    plan.layout("down", broadcast)
    a, b, _, block = networks(P_world, plan=plan)
    fast = gpudist.compiled(a, backend="eager")
    for _ in range(2):
        results = [fast(block), b(block)]
        for y in results:
            ((y["features"] ** 2).sum() + y["classes"].sum()).backward()
            assert y["features"].sbp == (broadcast,)
        torch.testing.assert_close(*(y["features"].to_local() for y in results))
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    for (name, p), q in zip(a.named_buffers(), b.buffers(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


@distributed(ranks=2, transports=["host"], timeout_s=300)
def test_calls_of_another_kind_have_another_graph(P_world: Partition) -> None:
    a, b, whole, block = networks(P_world)
    fast = gpudist.compiled(a, block, backend="eager")
    b(block)
    kinds = [
        lambda net: net(block),
        lambda net: net(block, 2.0),
        lambda net: net(own_block(whole[:1], net_P(a))),
        lambda net: net.eval()(block) if net is not fast else (a.eval(), fast(block))[1],
    ]
    for count, call in enumerate(kinds, start=1):
        mine, theirs = call(fast), call(b)
        torch.testing.assert_close(mine["classes"].to_local(), theirs["classes"].to_local())
        assert len(fast._graphs) == count
    with torch.no_grad():
        assert not fast(block)["classes"].requires_grad
    assert len(fast._graphs) == len(kinds) + 1


def net_P(network: Any) -> Any:
    return network.P_x


@distributed(ranks=2, transports=["host"], timeout_s=300)
def test_what_cannot_be_recorded(P_world: Partition) -> None:
    a, _, _, block = networks(P_world, p=0.5)
    with pytest.raises(ConversionError, match=r"compiled: drop \(.*draws random numbers"):
        gpudist.compiled(a, block, backend="eager")
    a.eval()
    fast = gpudist.compiled(a, block, backend="eager")
    with pytest.raises(ConversionError, match="8 graphs were recorded"):
        for scale in range(9):
            fast(block, float(scale))
    with pytest.raises(ConversionError, match="is not a converted network"):
        gpudist.compiled(Small(), block)


class Floor(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.floor()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Step(nn.Module):
    """One function of the input and a parameter, after a constant that a graph may contain."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([-1.0, 2.0, 3.0]))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * float(torch.tensor(2.0)) + torch.arange(3).tolist()[1]
        return STEPS[self.function](x, self.p)


STEPS: dict[str, Any] = {
    "Tensor.__bool__": lambda x, p: x if x.sum() > 0 else -x,
    "Tensor.item": lambda x, p: x * x.mean().item(),
    "Tensor.tolist": lambda x, p: x * x.sum(0).tolist()[0],
    "Tensor.numpy": lambda x, p: x * float(p.detach().numpy()[1]),
    "Tensor.__float__": lambda x, p: x * float(p[0]),
    "torch.allclose": lambda x, p: x if torch.allclose(x, x * 2) else -x,
    "Tensor.__getitem__": lambda x, p: x / len(x[x > 0]),
    "Tensor.unique": lambda x, p: x * x.unique().numel(),
    "torch.where": lambda x, p: x * len(torch.where(p > 0)[0]),
    "Tensor.repeat_interleave": lambda x, p: x * len(p.repeat_interleave(p.abs().long())),
    "Tensor.register_hook": lambda x, p: [y := p * 2, y.register_hook(torch.neg), x * y[0]][-1],
    "Floor.apply": lambda x, p: Floor.apply(x * p),
    "Floor.apply of a parameter": lambda x, p: x * Floor.apply(p)[0],
}


@distributed(ranks=2, transports=["host"])
def test_function_that_a_graph_would_get_wrong(P_world: Any) -> None:
    x = torch.rand(2, 3) + P_world.rank
    for function in STEPS:
        net = gpudist.distribute(nn.Sequential(nn.Identity(), Step(function)), P_world.grid(2, 1))
        name = function.partition(" ")[0]
        with pytest.raises(ConversionError, match=rf"\b1 \(.*test_recorded.py, line .*{name}:"):
            gpudist.compiled(net, x, backend="eager")
        assert net(x).shape == (4, 3)


@distributed(ranks=2, transports=["host"])
def test_function_without_gradients_is_recorded(P_world: Any) -> None:
    net = gpudist.distribute(Step("Floor.apply"), P_world.grid(2, 1))
    fast = gpudist.compiled(net, backend="eager")
    with torch.no_grad():
        for n in (1, 2):
            x = torch.rand(2, 3) * n + P_world.rank
            torch.testing.assert_close(fast(x).to_local(), net(x).to_local())


@distributed(ranks=2, transports=["host"])
def test_a_refusal_restores_buffers(P_world: Any) -> None:
    alone = nn.Sequential(nn.BatchNorm1d(3), Step("Tensor.item"))
    net: Any = gpudist.distribute(copy.deepcopy(alone), P_world.grid(2, 1))
    with pytest.raises(ConversionError, match="reads values"):
        gpudist.compiled(net, torch.rand(2, 3) + P_world.rank, backend="eager")
    assert not net[0].running_mean.any() and not net[0].num_batches_tracked


class _PartlyCompiled(nn.Module):
    """Network one of whose functions is compiled, by its author."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.scaled = torch.compile(lambda x: x.sin() * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.conv(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_plan_compiles_nothing() -> None:
    plan = gpudist.plan_of(_PartlyCompiled(), (1, 1, 2, 1), (2, 2, 8, 8))
    assert plan.sent_bytes == 2 * 2 * 1 * 8 * 4  # one row to the neighbor
    assert [row.function.split(".")[-1] for row in plan.rows] == ["conv2d", "sin", "mul"]


@distributed(ranks=1, transports=["loopback"])
def test_torch_compile_does_not_trace_networks(P_world: Partition) -> None:
    a, _, _, block = networks(P_world)
    with pytest.raises(Unsupported, match=r"gpudist\.compiled"):
        torch.compile(a, backend="eager", fullgraph=True)(block)
    found = torch.compile(a, backend="eager")(block)
    torch.testing.assert_close(found["features"], a(block)["features"])


@pytest.mark.parametrize("scale", [torch.nn.Identity(), abs, np.float32, np.ones(1), [object()]])
@distributed(ranks=2, transports=["loopback"])
def test_arguments_that_may_change_are_refused(P_world: Partition, scale: Any) -> None:
    a, _, _, block = networks(P_world)
    with pytest.raises(ConversionError, match=r"argument 1 of the call: a \w+ may change"):
        gpudist.compiled(a, backend="eager")(block, scale)
