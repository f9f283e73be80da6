"""Operators and layers under torch's tracers, dispatch modes and transforms.

A movement writes into memory by its address, which no tracer sees. Anything that traces or replaces
torch's operations must therefore see one operation of the library, or raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import gpudist
from gpudist.errors import GpudistError, ShapeError
from gpudist.world.partition import Partition
from tests.pool import distributed

Function = Callable[[torch.Tensor], torch.Tensor]


def _halo(P_world: Partition) -> Function:
    P = _columns(P_world)
    return lambda x: gpudist.halo_exchange(x, P, halo=((1, 1),))


def _all_sum(P_world: Partition) -> Function:
    P = _columns(P_world)
    return lambda x: gpudist.all_sum_reduce(x, P, axes_reduce=(2,))


def _dynamic(P_world: Partition) -> Function:
    P = _columns(P_world)
    return lambda x: gpudist.all_sum_reduce(x, P, axes_reduce=(2,), shape="dynamic")


def _network(P_world: Partition) -> Function:
    """Parameters, statistics, a pool and sums over workers."""
    P = _columns(P_world)
    network = torch.nn.Sequential(
        gpudist.nn.DistributedConv1d(P, 2, 4, 3, padding=1, dtype=torch.float64),
        gpudist.nn.DistributedBatchNorm(P, 4, dtype=torch.float64, track_running_stats=False),
        torch.nn.GELU(),
        gpudist.nn.DistributedMaxPool1d(P, 2),
        gpudist.nn.DistributedConv1d(
            P, 4, 2, 3, dtype=torch.float64, replicate_parameters=True
        ),
    )  # fmt: skip
    return gpudist.nn.fuse_parameter_movements(network)


def _invariant(P_world: Partition) -> Function:
    P = P_world.create_cartesian_topology_partition([P_world.size])
    up = gpudist.nn.ColumnParallelLinear(P, 8, 6, dtype=torch.float64, convention="invariant")
    down = gpudist.nn.RowParallelLinear(P, 6, 8, dtype=torch.float64, convention="invariant")
    return torch.nn.Sequential(up, torch.nn.Tanh(), down)


FUNCTIONS = [_halo, _all_sum, _dynamic, _network, _invariant]


def _columns(P_world: Partition) -> gpudist.CartesianPartition:
    return P_world.create_cartesian_topology_partition([1, 1, P_world.size])


def _input(P_world: Partition, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 8, dtype=torch.float64, generator=generator)


def _as_module(function: Function) -> torch.nn.Module:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function(x)

    return Wrapped()


def _gradient(function: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(function(x).sin().sum(), x)[0]


def _replayed(function: Function, x: torch.Tensor, tracing_mode: Any) -> torch.Tensor:
    other = torch.zeros_like(x)
    return make_fx(function, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(other)(x)


def _exported(function: Function, x: torch.Tensor, strict: bool) -> torch.Tensor:
    program = torch.export.export(_as_module(function), (torch.zeros_like(x),), strict=strict)
    return program.module()(x)


def _under(mode: Any, function: Function, x: torch.Tensor) -> torch.Tensor:
    with mode:
        return function(x)


def _counted(function: Function, x: torch.Tensor) -> torch.Tensor:
    return _under(FlopCounterMode(display=False), function, x)


def _debugged(function: Function, x: torch.Tensor) -> torch.Tensor:
    return _under(CommDebugMode(), function, x)


def _functionalized(function: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functionalize(function)(x)


def _functionalized_and_replayed(function: Function, x: torch.Tensor) -> torch.Tensor:
    return make_fx(torch.func.functionalize(function))(torch.zeros_like(x))(x)


TRACERS: dict[str, Callable[[Function, torch.Tensor], torch.Tensor]] = {
    "make_fx": partial(_replayed, tracing_mode="real"),
    "make_fx, fake": partial(_replayed, tracing_mode="fake"),
    "make_fx, symbolic": partial(_replayed, tracing_mode="symbolic"),
    "export": partial(_exported, strict=False),
    "strict export": partial(_exported, strict=True),
    "functionalize": _functionalized,
    "make_fx of functionalize": _functionalized_and_replayed,
    "FlopCounterMode": _counted,
    "CommDebugMode": _debugged,
}


# torch.fx, Dynamo and torch's module tracker belong to the process: not for ranks that are threads.
ON_PROCESSES = ("host", "gloo", "nccl")


def _check_tracer(P_world: Partition, tracer: str) -> None:
    x = _input(P_world, 1)
    for made in FUNCTIONS:
        function = made(P_world)
        with torch.no_grad():
            expected = function(x)
            found = TRACERS[tracer](function, x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=made.__name__)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tracer", list(TRACERS))
@distributed(ranks=2, transports=ON_PROCESSES)
def test_a_tracer_gives_the_right_numbers(P_world: Partition, tracer: str) -> None:
    _check_tracer(P_world, tracer)


@distributed(ranks=1, transports=("loopback",))
def test_tracers_give_the_right_numbers_in_a_world_of_one(P_world: Partition) -> None:
    for tracer in TRACERS:
        _check_tracer(P_world, tracer)


@distributed(ranks=2)
def test_fake_tensors_pass_and_leave_nothing_behind(P_world: Partition) -> None:
    for made in FUNCTIONS:
        function, x = made(P_world), _input(P_world, 1)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(x)
            found = function(fake.requires_grad_())
            (gradient,) = torch.autograd.grad(found.sum(), fake)
        assert isinstance(found, FakeTensor)
        assert isinstance(gradient, FakeTensor)
        real = function(x.requires_grad_())
        assert not isinstance(real, FakeTensor)
        assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
        assert gradient.shape == _gradient(function, x).shape


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
@distributed(ranks=2)
def test_selective_checkpointing_gives_the_same_gradient(
    P_world: Partition, policy: CheckpointPolicy
) -> None:
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    for made in FUNCTIONS:
        function, x = made(P_world), _input(P_world, 1).requires_grad_()
        kept = checkpoint(
            _sines, function, x, use_reentrant=False, context_fn=contexts
        )  # fmt: skip
        (found,) = torch.autograd.grad(kept.sum(), x)
        torch.testing.assert_close(found, _gradient(function, x), rtol=0, atol=1e-12)


def _sines(function: Function, x: torch.Tensor) -> torch.Tensor:
    return function(x).sin()


@distributed(ranks=2, transports=ON_PROCESSES)
def test_a_traced_gradient_is_right(P_world: Partition) -> None:
    for made in FUNCTIONS:
        function, x = made(P_world), _input(P_world, 1).requires_grad_()
        expected = _gradient(function, x)
        graph = make_fx(partial(_gradient, function), _allow_non_fake_inputs=True)(
            torch.zeros_like(x).requires_grad_()
        )
        torch.testing.assert_close(graph(x), expected, rtol=0, atol=1e-12)
        summed = torch.func.grad(partial(_sum_of_sines, function))
        graph = make_fx(summed, _allow_non_fake_inputs=True)(torch.zeros_like(x))
        torch.testing.assert_close(graph(x.detach()), expected, rtol=0, atol=1e-12)


def _sum_of_sines(function: Function, x: torch.Tensor) -> torch.Tensor:
    return function(x).sin().sum()


@distributed(ranks=2, transports=ON_PROCESSES)
def test_an_exported_program_learns(P_world: Partition) -> None:
    function, x = _network(P_world), _input(P_world, 1).requires_grad_()
    program = torch.export.export(_as_module(function), (torch.zeros_like(x),)).module()
    found = _gradient(program, x)
    torch.testing.assert_close(found, _gradient(function, x), rtol=0, atol=1e-12)


@distributed(ranks=2, transports=ON_PROCESSES)
def test_a_script_cannot_be_traced(P_world: Partition) -> None:
    for made in FUNCTIONS:
        function, x = made(P_world), _input(P_world, 1)
        function(x)
        with warnings.catch_warnings(), pytest.raises(GpudistError, match=r"torch\.jit\.trace"):
            warnings.simplefilter("ignore")  # that it is deprecated
            torch.jit.trace(function, x, check_trace=False)


@pytest.mark.one_in(2)
@distributed(ranks=2, transports=ON_PROCESSES)
def test_a_fused_network_is_compiled_after_it_ran(P_world: Partition) -> None:
    function, x = _network(P_world), _input(P_world, 1)
    expected = function(x)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-12)


@distributed(ranks=2)
def test_batches_of_calls_are_refused(P_world: Partition) -> None:
    for made in FUNCTIONS:
        function, x = made(P_world), _input(P_world, 1)
        function(x)
        with pytest.raises(ShapeError, match="vmap"):
            torch.func.vmap(function)(torch.stack([x, x]))


@distributed(ranks=2)
def test_batched_gradients_are_refused(P_world: Partition) -> None:
    for made in FUNCTIONS:
        function, x = made(P_world), _input(P_world, 1).requires_grad_()
        y = function(x)
        starts = torch.stack([torch.ones_like(y)] * 2)
        with pytest.raises(ShapeError, match="is_grads_batched"):
            torch.autograd.grad(y, x, starts, is_grads_batched=True)
