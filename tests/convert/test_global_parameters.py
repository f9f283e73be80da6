"""Optimizers and vector functions of torch on parameters of every kind, as on sequential ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import utils
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode

import gpudist
from gpudist import Plan, sbp
from gpudist.world.partition import Partition
from tests.nn.compare import grid
from tests.pool import distributed

Train = Callable[[nn.Module], Any]


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 4)).double()


def split(P_world: Partition, whole: nn.Module, shapes: dict[str, Any], **options: Any) -> Any:
    plan = Plan()
    for path, shape in shapes.items():
        plan.split_weight(path, shape)
    return gpudist.distribute(whole, grid(P_world, [P_world.size, 1, 1]), plan, **options)


def as_global(P_world: Partition, whole: nn.Module) -> Any:
    placement = sbp.Placement.of(grid(P_world, [P_world.size]))
    return gpudist.to_global(copy.deepcopy(whole), placement, sbp.broadcast)


KINDS: dict[str, Callable[[Partition, nn.Module], Any]] = {
    "replicated": partial(split, shapes={}),
    "one owner": partial(split, shapes={}, replicate_parameters=False),
    "split": partial(split, shapes={"0": (1, 1, 3, 1), "2": (1, 1, 1, 3)}),
    "split and one owner": partial(split, shapes={"0": (1, 1, 2, 1)}, replicate_parameters=False),
    "global": as_global,
}


def on_grids(P_world: Partition, whole: nn.Module, **options: Any) -> Any:
    """Split along rows and columns, with copies, and on fewer workers."""
    shapes = {"0": (1, 1, 2, 2), "2": (2, 1, 2, 1), "3": (1, 1, 1, 2)}
    return split(P_world, whole, shapes, **options)


def two_d(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.dim() == 2]


# Optimizers of torch; foreach and fused ones as options of a few.
def _is_plain_optimizer(kind: Any) -> bool:
    others = optim.Optimizer, optim.SparseAdam, optim.LBFGS, optim.Muon
    return isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind not in others


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    name: lambda net, kind=kind: kind(net.parameters(), lr=0.02)
    for name, kind in vars(optim).items()
    if _is_plain_optimizer(kind)
}
OPTIMIZERS |= {
    "LBFGS": lambda net: optim.LBFGS(net.parameters(), lr=0.5, max_iter=3),
    "LBFGS, Wolfe": lambda net: optim.LBFGS(
        net.parameters(), max_iter=3, line_search_fn="strong_wolfe"
    ),
    "Muon": lambda net: optim.Muon(two_d(net), lr=0.01),
    "SGD, foreach": lambda net: optim.SGD(net.parameters(), 0.1, 0.9, foreach=True),
    "Adam, foreach": lambda net: optim.Adam(net.parameters(), foreach=True, amsgrad=True),
    "Adam, fused": lambda net: optim.Adam(net.parameters(), fused=True),
    "Adagrad, fused": lambda net: optim.Adagrad(net.parameters(), fused=True),
}


def vectors(net: nn.Module) -> None:
    vector = utils.parameters_to_vector(net.parameters())
    utils.vector_to_parameters(vector * 1.25, net.parameters())


def clip_by_total(net: nn.Module) -> None:
    total = utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
    utils.clip_grads_with_norm_(net.parameters(), 0.01, total)


FUNCTIONS: dict[str, Train] = {
    "clip_grad_norm_": lambda net: utils.clip_grad_norm_(net.parameters(), 0.01),
    "maximum norm": lambda net: utils.clip_grad_norm_(net.parameters(), 1e-3, float("inf")),
    "foreach": lambda net: utils.clip_grad_norm_(net.parameters(), 1e-2, foreach=True),
    "total norm": clip_by_total,
    "clip_grad_value_": lambda net: utils.clip_grad_value_(net.parameters(), 1e-3),
    "vectors": vectors,
}


def step(net: nn.Module, optimizer: Any, x: torch.Tensor, clip: Train | None) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        y = net(x)
        loss: Any = (y * y).mean()
        loss.backward()
        if clip is not None:
            clip(net)
        value: Any = loss.detach()
        if not isinstance(value, sbp.GlobalTensor):
            return value
        world = value.placement.partition.world
        everyone = sbp.Placement.of(grid(world, [world.size]))
        return gpudist.to_global(value, everyone, sbp.broadcast)

    optimizer.step(closure)


def assert_trained_alike(
    P_world: Partition,
    make: Callable[[Partition, nn.Module], Any],
    optimizer: Callable[[nn.Module], Any],
    clip: Train | None = None,
) -> None:
    whole = network()
    net = make(P_world, copy.deepcopy(whole))
    is_converted = hasattr(net, "P_x")
    optimizers = [optimizer(whole), optimizer(net)]
    for number in range(2):
        x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(number)).double()
        step(whole, optimizers[0], x, clip)
        if not is_converted:
            first: Any = next(net.parameters())
            x = gpudist.to_global(x, first.placement, sbp.broadcast)
        else:
            x = gpudist.scatter(x, net.P_x)
        step(net, optimizers[1], x, clip)
    # Muon computes in bfloat16.
    tolerance = 3e-2 if isinstance(optimizers[0], optim.Muon) else 1e-9
    if not is_converted:
        found = {name: x.full_tensor() for name, x in net.state_dict().items()}
    else:
        found = gpudist.checkpoint.full_state_dict(net, to_all=True)
    for name, expected in whole.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance)
    assert_copies_equal(P_world, net)


def assert_copies_equal(P_world: Partition, net: nn.Module) -> None:
    """Copies of a parameter on several workers are equal to the bit."""
    for name, p in net.named_parameters():
        if isinstance(p, sbp.GlobalTensor) and not p.is_copy_everywhere:
            continue
        own = p.to_local() if isinstance(p, sbp.GlobalTensor) else p
        copies = P_world.allgather_data(own.flatten().tolist())
        assert all(one == copies[0] for one in copies), name


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(ranks=3, transports=["loopback"])
def test_optimizer(P_world: Partition, name: str, kind: str) -> None:
    assert_trained_alike(P_world, KINDS[kind], OPTIMIZERS[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
@distributed(ranks=3, transports=["loopback"])
def test_function(P_world: Partition, name: str, kind: str) -> None:
    assert_trained_alike(P_world, KINDS[kind], OPTIMIZERS["SGD"], FUNCTIONS[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("replicate", [True, False], ids=["replicated", "owned"])
@distributed(ranks=4, transports=["loopback"])
def test_blocks_on_other_grids(P_world: Partition, replicate: bool) -> None:
    """Functions of one parameter, and norms, are right; vectors of all parameters are refused."""
    make = partial(on_grids, replicate_parameters=replicate)
    assert_trained_alike(P_world, make, OPTIMIZERS["Adafactor"])
    assert_trained_alike(P_world, make, OPTIMIZERS["Adam, fused"], FUNCTIONS["clip_grad_norm_"])
    for function in (OPTIMIZERS["LBFGS"], lambda net: vectors(net)):
        with pytest.raises(gpudist.PartitionError, match=r"torch.cat: tensors are on .*; move one"):
            net = make(P_world, network())
            step(net, function(net), gpudist.scatter(torch.ones(3, 2, 6).double(), net.P_x), None)


class _Counting(TorchDispatchMode):
    """Counts the operators of torch that run on parts of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["foreach", "fused"])
@distributed(ranks=2, transports=["loopback"])
def test_steps_run_as_many_kernels_as_on_blocks(P_world: Partition, way: str) -> None:
    """Parameters of a network are stepped together, whatever their layouts."""
    net = split(P_world, network(), {"0": (1, 1, 2, 1), "2": (1, 1, 1, 2)})
    blocks = [nn.Parameter(torch.zeros_like(p.to_local())) for p in net.parameters()]
    counts: list[int] = []
    for parameters in (blocks, list(net.parameters())):
        adam: Any = optim.Adam
        optimizer = adam(parameters, **{way: True})
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        with _Counting() as counting:
            optimizer.step()
        counts.append(counting.count)
    assert counts[0] == counts[1]
    # On GPUs, the default is foreach.
    assert all(type(p) in _foreach_supported_types for p in net.parameters())


class _FirstLayer(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self[0](input)


@distributed(ranks=3, transports=["loopback"])
def test_hooks_of_parameters_that_a_call_does_not_use(P_world: Partition) -> None:
    for kind in ("replicated", "one owner", "split"):
        whole, names = _FirstLayer(*network().children()), list[str]()
        for name, parameter in whole.named_parameters():
            parameter.register_hook(lambda _, name=name, names=names: names.append(name))
        net = KINDS[kind](P_world, whole)
        net(torch.ones(1, 2, 6, dtype=torch.float64)).sum().backward()
        assert sorted(names) == ["0.bias", "0.weight"]
        assert net[2].weight.grad is None
