"""Parameters that are global tensors: what modules, autograd and checkpoints do with them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import gpudist
from gpudist import Plan
from gpudist.checkpoint import full_optimizer_state_dict, full_state_dict
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed

BOTH = pytest.mark.parametrize("replicate", [True, False], ids=["split", "owned"])
ON_TWO = distributed(ranks=2, transports=["loopback"])


def network() -> nn.Module:
    torch.manual_seed(4)
    net: Any = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 4)).double()
    net[3].weight.mark = "kept"
    return net


def converted(
    P_world: Partition, replicate: bool, make: Callable[[], nn.Module] = network, path: str = "0"
) -> Any:
    plan = Plan()
    if replicate:
        plan.split_weight(path, (1, 1, 2, 1))
    P_x = grid(P_world, [2, 1, 1])
    return gpudist.distribute(make(), P_x, plan, replicate_parameters=replicate)


def backward(net: Any) -> None:
    x = torch.linspace(-1, 1, 36).view(2, 3, 6).double()
    y = net(gpudist.scatter(x, net.P_x) if hasattr(net, "P_x") else x)
    (y * y).mean().backward()


def step(net: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(net)
    optimizer.step()


def adam(net: nn.Module) -> Any:
    return torch.optim.Adam(net.parameters(), lr=0.1)


def assert_weights(net: nn.Module, whole: nn.Module) -> None:
    found = full_state_dict(net, to_all=True)
    for name, expected in whole.state_dict().items():
        torch.testing.assert_close(found[name], expected, msg=name)


@BOTH
@ON_TWO
def test_state_dicts_have_blocks(P_world: Partition, replicate: bool) -> None:
    net = converted(P_world, replicate)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    rows = ((5, 6), (4, 6)) if replicate else ((9, 6), (0,))
    assert state["0.weight"].shape == rows[P_world.rank or 0]
    assert net[0].weight.shape == (9, 6) and isinstance(net[0].weight, nn.Parameter)
    for assign in (False, True):
        other = converted(P_world, replicate)
        nn.init.zeros_(other[0].weight)
        other.load_state_dict(state, assign=assign)
        assert all(type(p) is GlobalParameter for p in other.parameters())
        assert_weights(other, network())
        whole = network()
        step(other, adam(other))
        step(whole, adam(whole))
        assert_weights(other, whole)
    if replicate or P_world.rank:
        with pytest.raises(RuntimeError, match=r"0.weight: .* \[9, 6\], and this worker's block"):
            net.load_state_dict(network().state_dict())


@BOTH
@ON_TWO
def test_copies_and_averages(P_world: Partition, replicate: bool) -> None:
    net, whole = converted(P_world, replicate), network()
    nets = [net, whole]
    averages = [
        swa_utils.AveragedModel(n, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)) for n in nets
    ]
    for _ in range(2):
        for one, average in zip(nets, averages, strict=True):
            step(one, adam(one))
            average.update_parameters(one)
    assert_weights(averages[0].module, averages[1].module)
    assert_weights(net, whole)
    twin = copy.deepcopy(net)
    step(twin, adam(twin))
    assert_weights(net, whole)
    step(whole, adam(whole))
    assert_weights(twin, whole)


@BOTH
@ON_TWO
def test_dtypes_and_frozen_parameters(P_world: Partition, replicate: bool) -> None:
    net, whole = converted(P_world, replicate), network()
    before = list(net.parameters())
    one: Any
    for one in (net, whole):
        one.float()
        assert {p.dtype for p in one.parameters()} == {torch.float32}
        one.double()
        one[0].requires_grad_(False)
        step(one, adam(one))
        assert one[0].weight.grad is None
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    assert_weights(net, whole)


@BOTH
@ON_TWO
def test_gradients_outside_of_a_forward(P_world: Partition, replicate: bool) -> None:
    """A penalty is a global tensor, and adds its gradient once."""
    net, whole = converted(P_world, replicate), network()
    seen: list[Any] = []
    assert net[3].weight.mark == "kept"
    net[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    for one in (net, whole):
        backward(one)
        penalty: Any = sum(p.square().sum() for p in one.parameters())
        penalty.backward()
    a: Any
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
        found: Any = torch.autograd.grad(a.square().sum(), [a])[0]
        torch.testing.assert_close(found.full_tensor(), 2 * b.detach())
    assert seen == [(5,), (5,)]
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        net[0].weight.add_(1)


@BOTH
@ON_TWO
def test_infinite_gradients(P_world: Partition, replicate: bool) -> None:
    """With torch's scaler too, all workers skip the step if one finds an infinite gradient."""
    net = converted(P_world, replicate)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    backward(net)
    part = net[0].weight.grad.to_local()
    if P_world.rank == (1 if replicate else 0):
        part.fill_(float("inf"))
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_weights(net, network())


@BOTH
@ON_TWO
def test_checkpoints(P_world: Partition, replicate: bool, tmp_path: Path) -> None:
    net, whole = converted(P_world, replicate), network()
    optimizers = [adam(net), adam(whole)]
    for one, optimizer in zip((net, whole), optimizers, strict=True):
        step(one, optimizer)
    gpudist.checkpoint.save(net, tmp_path / "saved", optimizers[0])
    states = full_optimizer_state_dict(net, optimizers[0], to_all=True)["state"]
    for number, state in optimizers[1].state_dict()["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(states[number][key], value)
    loaded = converted(P_world, replicate)
    optimizer = adam(loaded)
    gpudist.checkpoint.load(loaded, tmp_path / "saved", optimizer)
    step(loaded, optimizer)
    step(whole, optimizers[1])
    assert_weights(loaded, whole)
    other = converted(P_world, replicate)
    optimizer = adam(other)
    gpudist.checkpoint.load_full_state_dict(other, whole.state_dict())
    gpudist.checkpoint.load_full_optimizer_state_dict(other, optimizer, optimizers[1].state_dict())
    step(other, optimizer)
    step(whole, optimizers[1])
    assert_weights(other, whole)
    with pytest.raises(NotImplementedError, match=r"optimizer's state, use gpudist.checkpoint"):
        torch.save(optimizer.state_dict(), io.BytesIO())


class _InDict(nn.Module):
    """Uses a parameter that it also keeps in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()
        self.kept = {"weight": self.layer.weight}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + (self.kept["weight"] * 2).sum()


@BOTH
@ON_TWO
def test_parameters_kept_elsewhere(P_world: Partition, replicate: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(4)
        return _InDict()

    net, whole = converted(P_world, replicate, make, "layer"), make()
    twin = copy.deepcopy(net)
    for one in (net, twin, whole):
        step(one, adam(one))
    for one in (net, twin):
        assert_weights(one, whole)
        back: Any = gpudist.sequential(one)
        assert back.kept["weight"] is back.layer.weight


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@BOTH
@ON_TWO
def test_recomputed_forwards(P_world: Partition, replicate: bool) -> None:
    net, whole = converted(P_world, replicate, _Recomputed, "inner.0"), _Recomputed()
    for one in (net, whole):
        step(one, adam(one))
    assert_weights(net, whole)


@ON_TWO
def test_shared_weights_are_not_split(P_world: Partition) -> None:
    def make() -> nn.Module:
        net: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        net[1].weight = net[0].weight
        return net

    with pytest.raises(gpudist.ConversionError, match=r"0: .* the modules \['1'\] use them too"):
        converted(P_world, True, make)
