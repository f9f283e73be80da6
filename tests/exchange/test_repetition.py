"""Native repetition of a call: only if nothing differs from the last one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import gpudist
from gpudist.errors import GpudistError, PeerFailure
from gpudist.exchange.tracing import is_eager
from gpudist.ops import Broadcast, HaloExchange, Repartition, SumReduce
from gpudist.ops.operator import Operator, zero_volume_tensor
from gpudist.transport.failure.channel import Failure
from gpudist.transport.flight_recorder import Observer, Operation, Phase
from gpudist.world.partition import Partition
from tests.pool import distributed

NATIVE = ("host", "nccl", "loopback")


def called(P_world: Partition, x: torch.Tensor, **options: Any) -> tuple[HaloExchange, Any]:
    """Return an operator that was called with ``x``, and what repeats that call."""
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    operator = HaloExchange(P_x, halo=((1, 1),), periodic=True, **options)
    operator(x)
    return operator, operator._bindings.repeat


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@distributed(ranks=2, transports=NATIVE)
def test_it_is_the_call(P_world: Partition) -> None:
    x = torch.arange(4.0) + 4 * (P_world.rank or 0)
    operator, repeat = called(P_world, x)
    gpudist.stats(reset=True, P_world=P_world)
    z = x + 100
    y = repeat(z)
    assert torch.equal(y, operator(z)) and y.shape == (6,) and not y.requires_grad
    assert torch.equal(y[1:-1], z) and y.data_ptr() != repeat(z).data_ptr()
    (row,) = [r for r in P_world.wire.recorder.rows() if r.operator == "halo_exchange"]
    assert (row.calls, row.messages) == (3, 3 * 1)
    assert row.sent_bytes == 3 * 2 * 4


ONE_SIDED: dict[str, Callable[[Partition, Partition], Operator]] = {
    "broadcast": lambda P_all, P_root: Broadcast(P_root, P_all),
    "sum_reduce": lambda P_all, P_root: SumReduce(P_all, P_root),
    "scatter": lambda P_all, P_root: Repartition(P_root, P_all),
    "gather": lambda P_all, P_root: Repartition(P_all, P_root),
}


@pytest.mark.parametrize("name", ONE_SIDED)
@distributed(ranks=3, transports=NATIVE)
def test_ranks_without_an_input_or_an_output_repeat_it(P_world: Partition, name: str) -> None:
    P_root = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
    P_all = P_world.create_cartesian_topology_partition([1, 3])
    operator = ONE_SIDED[name](P_all, P_root)
    x = torch.arange(12.0).view(2, 6) + 100 * (P_world.rank or 0)
    x = x if operator.P_x.active else zero_volume_tensor(2)
    operator(x)
    repeat, z = operator._bindings.repeat, 10 * x
    y = repeat(z)
    assert y is not None
    assert torch.equal(y, operator.forward(z)) and torch.equal(y, 10 * operator(x))
    assert y.shape == operator(x).shape and (y.numel() > 0) == operator.P_y.active
    for other in (z.double(), z.clone().requires_grad_(), torch.empty(0), torch.empty(3, 0), None):
        assert repeat(other) is None


@distributed(ranks=2, transports=NATIVE)
def test_another_tensor_is_left_to_the_call(P_world: Partition) -> None:
    _, repeat = called(P_world, torch.ones(4))
    others = (
        torch.ones(5), torch.ones(4, dtype=torch.float64), torch.ones(8)[::2], torch.ones(2, 2),
        torch.ones(4, requires_grad=True), torch._neg_view(torch.ones(4)), None, "x",
        torch.ones(4).as_subclass(Subclass), torch.ones(4, device="meta"),
        torch._efficientzerotensor([4]), torch.nn.Parameter(torch.ones(4)),
    )  # fmt: skip
    for other in others:
        assert repeat(other) is None, other
    assert torch.equal(repeat(torch.ones(4)), torch.ones(6))


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": Passing,
    "forward mode": forward_ad.dual_level,
}


@pytest.mark.parametrize("state", STATES)
@distributed(ranks=2, transports=NATIVE)
def test_another_state_of_torch_is_left_to_the_call(P_world: Partition, state: str) -> None:
    x = torch.ones(4)
    _, repeat = called(P_world, x)
    with STATES[state]():
        assert not is_eager(x)
        assert repeat(x) is None
    assert repeat(x) is not None


# Tracers belong to the process, and ranks of loopback share it.
@distributed(ranks=2, transports=("host", "nccl"))
def test_transforms_and_tracers_are_left_to_the_call(P_world: Partition) -> None:
    x = torch.ones(4)
    _, repeat = called(P_world, x)
    seen: list[object] = []

    def inside(y: torch.Tensor) -> torch.Tensor:
        seen.append(repeat(x))
        return y.sum()

    grad(inside)(torch.ones(3))
    vmap(inside)(torch.ones(3, 2))
    functional_call(torch.nn.Identity(), {}, (x,))
    torch.jit.trace(inside, torch.ones(3), check_trace=False)
    assert seen == [None] * len(seen) and len(seen) >= 3


@distributed(ranks=2, transports=NATIVE)
def test_gradients_are_left_to_the_call(P_world: Partition) -> None:
    x = torch.ones(4)
    operator, _ = called(P_world, x)
    x.requires_grad_()
    y = operator(x)
    y.sum().backward()
    assert torch.equal(x.grad if x.grad is not None else y, torch.tensor([2.0, 1.0, 1.0, 2.0]))
    with torch.no_grad():
        assert not operator(x).requires_grad


@distributed(ranks=2, transports=NATIVE)
def test_an_operator_that_agrees_at_every_call_repeats_nothing(P_world: Partition) -> None:
    _, repeat = called(P_world, torch.ones(4), shape="dynamic")
    assert repeat(torch.ones(4)) is None


@distributed(ranks=2, transports=NATIVE)
def test_observers_see_repetitions(P_world: Partition) -> None:
    seen: list[str] = []

    class Sees(Observer):
        def begin_call(self, operation: Operation, phase: Phase) -> None:
            seen.append(phase)

        def post_message(self, operation: Operation, post: Any, number: int) -> None:
            seen.append(post.kind)

        def end_call(self, operation: Operation) -> None:
            seen.append("left")

    x = torch.ones(4)
    operator, repeat = called(P_world, x)
    observer = Sees()
    P_world.wire.recorder.observe(observer)
    try:
        operator(x)
        by_call = list(seen)
        seen.clear()
        assert repeat(x) is not None
    finally:
        P_world.wire.recorder.ignore(observer)
    assert seen == by_call and seen[0] == "run" and seen[-1] == "left"


@distributed(ranks=2, transports=("host",))
def test_hooks_of_an_operator_are_called(P_world: Partition) -> None:
    x = torch.ones(4)
    operator, _ = called(P_world, x)
    seen: list[str] = []
    hook = operator.register_forward_hook(lambda *_: seen.append("its own"))
    operator(x)
    hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append("any"))
    operator(x)
    hook.remove()
    operator(x)
    assert seen == ["its own", "any"]


@distributed(ranks=2, transports=NATIVE)
def test_a_failure_is_the_one_of_the_call(P_world: Partition) -> None:
    x = torch.ones(4)
    _, repeat = called(P_world, x)
    if P_world.rank == 0:
        P_world.wire.abort(Failure("PeerFailure", 0, "rank 0 gives up"))
    with pytest.raises(GpudistError, match="gives up") as caught:
        for _ in range(1000):
            repeat(x)
            P_world.barrier()
    assert isinstance(caught.value, PeerFailure)
