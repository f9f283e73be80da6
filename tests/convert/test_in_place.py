"""``distribute`` converts the network that it is given, or leaves it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn, optim
from torch.optim import swa_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpudist
from gpudist import ConversionError, GpudistError, Plan, distribute
from gpudist.planning.live_bytes import LiveBytes
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.convert.training import assert_gradients, assert_whole
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed

SHAPE = (2, 3, 6)
ON_TWO = distributed(ranks=2, transports=["loopback"])
KINDS = pytest.mark.parametrize("kind", ["full", "split", "owned"])


def network() -> Any:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def split(path: str = "0") -> Plan:
    plan = Plan()
    plan.split_weight(path, (1, 1, 2, 1))
    return plan


def options(kind: str) -> dict[str, Any]:
    return {"full": {}, "split": {"plan": split()}, "owned": {"replicate_parameters": False}}[kind]


def converted(net: nn.Module, P_x: Any, **options: Any) -> Any:
    """Call ``distribute``, for a checker of types."""
    return distribute(net, P_x, **options)


def backward(net: Any) -> None:
    x = random_like_all(SHAPE, 1)
    y = net(own_block(x, net.P_x, requires_grad=False) if hasattr(net, "P_x") else x)
    y.square().mean().backward()


@KINDS
@ON_TWO
def test_what_refers_to_the_network_refers_to_the_converted_one(
    P_world: Partition, kind: str
) -> None:
    alone, net = network(), network()
    seen: list[Any] = []
    for one in (alone, net):
        one.kept, one.closure = {"w": one[0].weight}, (lambda w: lambda: w)(one[0].weight)
        one[0].weight.mark = "kept"
        backward(one)
    removed = net[0].weight.register_hook(lambda g: pytest.fail("a removed hook"))
    net[0].weight.register_hook(lambda g: seen.append(("hook", g.shape)))
    net[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(("later", p)))
    before = [one.state_dict(keep_vars=True) for one in (alone, net)]
    optimizers = [optim.Adam(one.parameters()) for one in (alone, net)]
    assert converted(net, grid(P_world, [2, 1, 1]), **options(kind)) is net
    assert issubclass(type(net), nn.Sequential) and isinstance(net[0].bias, nn.Parameter)
    assert all(net.get_parameter(name) is p for name, p in before[1].items())
    w: Any = net[0].weight
    assert type(w) is (nn.Parameter if kind == "full" else GlobalParameter)
    assert w.shape == (8, 6) and vars(w)["mark"] == "kept"
    assert net.kept["w"] is w and net.closure() is w
    assert_gradients(net, alone, True)
    removed.remove()
    for one, optimizer in zip((alone, net), optimizers, strict=True):
        one.zero_grad()
        backward(one)
        optimizer.step()
    assert ("hook", (8, 6)) in seen and any(p is net[0].bias for _, p in seen)
    found = gpudist.checkpoint.full_state_dict(net, to_all=True)
    for name, expected in before[0].items():
        torch.testing.assert_close(found[name], expected.detach(), msg=name)


@KINDS
@ON_TWO
def test_averages_made_before(P_world: Partition, kind: str) -> None:
    """They are sequential, and follow full parameters; others are refused by the function."""
    net, alone = network(), network()
    average: Any = swa_utils.AveragedModel(net)
    converted(net, grid(P_world, [2, 1, 1]), **options(kind))
    if kind == "full":
        average.update_parameters(net)
        with torch.no_grad():
            net[0].weight.zero_()
        average.update_parameters(net)
        torch.testing.assert_close(average.module[0].weight, alone[0].weight / 2)
    else:
        with pytest.raises((GpudistError, NotImplementedError, RuntimeError)):
            average.update_parameters(net)
            average.update_parameters(net)


@pytest.mark.parametrize("kind", ["split", "owned"])
@ON_TWO
def test_state_of_full_parameters_is_refused(P_world: Partition, kind: str) -> None:
    net = network()
    optimizer = optim.Adam(net.parameters())
    backward(net)
    optimizer.step()
    whole = copy.deepcopy(optimizer.state_dict())
    converted(net, grid(P_world, [2, 1, 1]), **options(kind))
    backward(net)
    with pytest.raises(ConversionError, match=r"Adam: the state \['exp_avg', .*full_optimizer_st"):
        optimizer.step()
    later = optim.Adam(net.parameters())
    gpudist.checkpoint.load_full_optimizer_state_dict(net, later, whole)
    later.step()


@ON_TWO
def test_full_parameters_are_converted_whatever_refers_to_them(P_world: Partition) -> None:
    """Also beside a split weight, where the others would be global."""
    net: Any
    for kind in ("full", "split"):
        net, alone = network(), network()
        kept, graph = ref(net[2].weight), (net[2].bias * 2).sum()
        converted(net, grid(P_world, [2, 1, 1]), **options(kind))
        assert kept() is net[2].weight and type(kept()) is nn.Parameter
        backward(net)
        backward(alone)
        assert_gradients(net, alone, True)
        graph.backward()


@pytest.mark.filterwarnings("ignore:.*gathered by moving")
@ON_TWO
def test_recurrent_layers(P_world: Partition) -> None:
    """They keep weak references to their own weights."""
    nets: list[Any] = [nn.LSTM(3, 4).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    alone, net = nets
    converted(net, grid(P_world, [1, 2, 1]), replicate_parameters=False)
    refs = zip(net._flat_weight_refs, net.parameters(), strict=True)
    assert all(weak() is p for weak, p in refs)
    x = random_like_all((5, 2, 3), 1)
    with torch.no_grad():
        net.weight_ih_l0.mul_(2)
        alone.weight_ih_l0.mul_(2)
        assert_whole(net(own_block(x, net.P_x, requires_grad=False))[0], alone(x)[0], "output")


class _Fails(nn.Module):
    """Module that fails when it is moved, after a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(1))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.layer.weight.data, self.count = torch.zeros(6, 6), torch.ones(1)
        raise ValueError("cannot be moved")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _different(rank: int) -> Any:
    return nn.Sequential(nn.Linear(6, 8 + rank))


def _used(net: Any) -> Any:
    net.loss = net[0].weight.sum()
    return net


def _referred(net: Any) -> Any:
    return vars(net).update(kept=ref(net[0].weight)) or net


class _Slots(nn.Parameter):
    __slots__ = ("note",)


def _with_slots(net: Any) -> Any:
    net[0].weight = _Slots(net[0].weight.detach())
    return net


OWNED = {"replicate_parameters": False}
# For each cause, what makes the network on a rank, the options, and the message.
CAUSES: dict[str, tuple[Callable[[int], Any], dict[str, Any], str]] = {
    "inputs": (lambda _: network(), {"inputs": {"y": "whole"}}, r"inputs names \['y'\]"),
    "methods": (lambda _: network(), {"methods": ("encode",)}, "no method 'encode'"),
    "buffers": (lambda _: network(), {"local_buffers": ("n",)}, r"local_buffers names \['n'\]"),
    "unknown": (lambda _: network(), {"unknown": "guess"}, "unknown"),
    "path of a plan": (lambda _: network(), {"plan": split("9")}, r"no modules \['9'\]"),
    "layer of a plan": (lambda _: network(), {"plan": split("1")}, "got a Tanh"),
    "script": (lambda _: torch.jit.script(network()), {}, "not Python code"),
    "wrapper": (lambda _: nn.DataParallel(network()), {}, "is a DataParallel; convert .*wrap"),
    "compiled": (lambda _: torch.compile(network(), backend="eager"), {}, "is a OptimizedModule"),
    "weak reference": (lambda _: _referred(network()), OWNED, "'0.weight', .* weak references"),
    "graph": (lambda _: _used(network()), {"plan": split()}, "'0.weight', .* part of a graph"),
    "no shape": (lambda _: nn.Sequential(nn.LazyLinear(8)), {}, "'0.weight' has no shape"),
    "slots": (lambda _: _with_slots(network()), OWNED, "a _Slots, a class with __slots__"),
    "no values": (lambda _: network().to("meta"), {}, r"'0.weight' .*'meta' .*to_empty"),
    "ranks differ": (_different, {"broadcast_parameters": True}, "build the same network"),
    "moving": (lambda _: _Fails(), {}, "cannot be moved"),
}  # fmt: skip


def facts_of(network: nn.Module) -> Any:
    """Return the classes, the attributes by identity, and the values, of all modules."""
    attributes = [
        (
            type(module),
            key,
            [(k, id(x)) for k, x in value.items()] if isinstance(value, dict) else id(value),
        )
        for module in network.modules()
        for key, value in vars(module).items()
    ]
    tensors = [
        (type(x), x.requires_grad, x.device, None if x.is_meta else x.tolist())
        for x in (*network.parameters(), *network.buffers())
        if not isinstance(x, nn.UninitializedParameter)
    ]
    return attributes, tensors


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@ON_TWO
def test_a_refusal_changes_nothing(P_world: Partition) -> None:
    for cause, (make, given, message) in CAUSES.items():
        net = make(P_world.rank or 0)
        before = facts_of(net)
        with pytest.raises((GpudistError, ValueError), match=message):
            converted(net, grid(P_world, [2, 1, 1]), **given)
        assert facts_of(net) == before, cause
        assert not hasattr(net, "P_x"), cause


@ON_TWO
def test_converting_twice_is_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 1, 1])
    net = distribute(network(), P_x)
    before = facts_of(net)
    for again in (net, copy.deepcopy(net)):
        with pytest.raises(ConversionError, match=r"already, in place; .* gpudist.sequential\(ne"):
            distribute(again, P_x)
    assert facts_of(net) == before
    back: Any = gpudist.sequential(net)
    assert type(back) is nn.Sequential and type(net) is not nn.Sequential
    backward(distribute(back, grid(P_world, [1, 2, 1]), split()))


def test_threads_build_networks_of_their_own() -> None:
    net = network()
    with pytest.raises(ConversionError, match=r"are threads .* 'the network'.*within the function"):
        run_distributed(lambda P_world: distribute(net, P_world.grid(2, 1, 1)), 2)
    shared = nn.Linear(6, 6)
    with pytest.raises(ConversionError, match=r"are threads .* '0'.*within the function"):
        run_distributed(lambda P: distribute(nn.Sequential(shared), P.grid(2, 1)), 2)


class _Both(nn.Module):
    """A generator and a discriminator, or a backbone and a head."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _teacher_and_student() -> tuple[Any, Any]:
    backbone = network()
    student = _Both(backbone, nn.Linear(4, 4).double())
    teacher = _Both(backbone, nn.Linear(4, 4).double())
    teacher.second.weight = student.second.weight
    return teacher, student


@ON_TWO
def test_networks_that_share_modules(P_world: Partition) -> None:
    torch.manual_seed(1)
    teacher, student = _teacher_and_student()
    alone = copy.deepcopy(nn.ModuleList([teacher, student]))
    P_x = grid(P_world, [2, 1, 1])
    distribute(teacher, P_x)
    distribute(student, grid(P_world, [1, 2, 1]))
    both = distribute(_Both(teacher, nn.Identity()), P_x)
    for one in (teacher, student, both, alone[0], alone[1], alone[0]):
        backward(one)
    assert_gradients(nn.ModuleList([teacher, student]), alone, True)
    for kind in ("split", "owned"):
        first, second = _teacher_and_student()
        converted(first, P_x, **({"plan": split("first.0")} if kind == "split" else OWNED))
        before = facts_of(second)
        with pytest.raises(ConversionError, match=r"'first' is also part of a converted Distr"):
            distribute(second, P_x)
        assert facts_of(second) == before
    P_one = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1, 1])
    for made in (teacher.first, _Both(nn.Identity(), teacher.second)):
        with pytest.raises(ConversionError, match="converted for the same workers"):
            distribute(made, P_one)


@pytest.mark.parametrize("inputs", [{}, {"input": SHAPE}])
@ON_TWO
def test_whole_tensors_are_refused_with_the_reason(P_world: Partition, inputs: Any) -> None:
    P_x, whole = grid(P_world, [2, 1, 1]), random_like_all(SHAPE, 1)
    net = distribute(network(), P_x, inputs=inputs)
    if not inputs:
        with pytest.raises(gpudist.ShapeError, match="place by gpudist"):
            net(whole)
    with pytest.raises(ConversionError, match="converted in place"):
        net[0](whole)
    backward(net)
    with pytest.raises((gpudist.PlanMismatch, gpudist.ShapeError), match="place by gpudist"):
        net(whole)


@KINDS
@ON_TWO
def test_planning_and_going_back_change_nothing(P_world: Partition, kind: str) -> None:
    net, P_x = network(), grid(P_world, [2, 1, 1])
    for _ in range(2):
        before = facts_of(net) if type(net) is nn.Sequential else vars(net[0]).copy()
        assert gpudist.plan_of(net, P_x, SHAPE, plan=split() if kind == "split" else None).rows
        if type(net) is nn.Sequential:
            gpudist.planning.fits(net, SHAPE, 2)
            assert facts_of(net) == before
            converted(net, P_x, **options(kind))
        else:
            back: Any = gpudist.sequential(net)
            assert vars(net[0]) == before and type(back) is nn.Sequential
            assert all(type(p) is nn.Parameter for p in back.parameters())
            assert torch.equal(next(back.parameters()), network()[0].weight)


class _Counting(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.live.add(x)
        return result


@KINDS
@ON_TWO
def test_peak_of_memory(P_world: Partition, kind: str) -> None:
    net, live, given = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)]), LiveBytes(), Plan()
    for i in range(40):
        given.split_weight(str(i), (1, 1, 2, 1))
    for p in net.parameters():
        live.add(p.detach())
    weights = live.now_bytes
    plan = given if kind == "split" else None
    with _Counting(live):
        distribute(net, grid(P_world, [2, 1, 1]), plan, replicate_parameters=kind != "owned")
    assert live.peak_bytes - weights <= 0.05 * weights + 64 * 64 * 4
    share = {"full": 1, "split": 0.51, "owned": 1 if P_world.rank == 0 else 0}[kind]
    assert live.now_bytes <= share * weights
