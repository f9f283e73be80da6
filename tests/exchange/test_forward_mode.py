"""Forward mode through operators: the tangent moves by the same plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from gpudist import ops
from gpudist.world.partition import CartesianPartition, Partition
from tests.ops.dense import local_input, operations, partition_of, random
from tests.pool import distributed

OPERATORS: dict[str, Callable[[CartesianPartition, Partition], torch.nn.Module]] = {
    "halo exchange": lambda P_x, P_1: ops.HaloExchange(P_x, halo=((1, 1),), padding_value=7.0),
    "repartition": lambda P_x, P_1: ops.Repartition(P_x, partition_of(P_x, [1, 0], [2, 1])),
    "gather": lambda P_x, P_1: ops.Gather(P_x, 1),
    "all-gather": lambda P_x, P_1: ops.AllGather(P_x, [1]),
    "sum-scatter": lambda P_x, P_1: ops.SumScatter(P_x, [1]),
    "all-sum-reduce": lambda P_x, P_1: ops.AllSumReduce(P_x, [1]),
    "sum-reduce": lambda P_x, P_1: ops.SumReduce(P_x, P_1),
    "broadcast": lambda P_x, P_1: ops.Broadcast(P_x, P_x),
    "send-receive": lambda P_x, P_1: ops.SendRecv(P_x, partition_of(P_x, [1, 0], [1, 2])),
}


@pytest.mark.parametrize("name", OPERATORS)
@distributed(ranks=3, transports=["host", "gloo"])
def test_operator(P_world: Partition, name: str) -> None:
    P_x = partition_of(P_world, [0, 2], [1, 2])
    operator = OPERATORS[name](P_x, P_world.create_partition_inclusive([1]))
    x, t = local_input(random((4, 6), 1), P_x), local_input(random((4, 6), 2), P_x)
    linear: Any = operator
    if isinstance(operator, ops.HaloExchange):
        linear = ops.HaloExchange(P_x, halo=((1, 1),))
    expected_y, expected_t = operator(x), linear(t)
    for requires_grad in (False, True):
        x.requires_grad_(requires_grad)
        y, moved, *_ = torch.func.jvp(operator, (x,), (t,))
        torch.testing.assert_close((y.detach(), moved.detach()), (expected_y, expected_t))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(operator(forward_ad.make_dual(x, t)))
        assert dual.tangent is not None
        torch.testing.assert_close(dual.tangent.detach(), expected_t)


@distributed(ranks=2, transports=["host"])
def test_tangents_are_one_more_group(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    operator = ops.HaloExchange(P_x, halo=((1, 1),))
    x = torch.ones(2, 3)
    operator(x)
    before = operations(P_world)
    torch.func.jvp(operator, (x,), (x,))
    assert operations(P_world) - before == 1 + 2


@distributed(ranks=2, transports=["loopback", "host"])
def test_reverse_mode_of_torch_func(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    operator = ops.HaloExchange(P_x, halo=((1, 1),))
    x = random((2, 3), P_world.rank or 0).requires_grad_()
    (expected,) = torch.autograd.grad(operator(x).pow(3).sum(), x)
    actual = torch.func.grad(lambda x: operator(x).pow(3).sum())(x.detach())
    torch.testing.assert_close(actual, expected)


# Torch's own, when it loads what forward mode needs.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
@pytest.mark.parametrize("operator", [ops.add, ops.copy, ops.move, ops.copy_adjoint])
def test_memory(operator: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    a, b, t, s = (random((3,), seed) for seed in range(4))
    values, tangents, *_ = torch.func.jvp(operator, (a, b), (t, s))
    torch.testing.assert_close((values, tangents), (operator(a, b), operator(t, s)))
