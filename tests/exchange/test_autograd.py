"""The bridge to autograd, at the points where distributed graphs usually break."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpudist import ops
from gpudist.exchange import Movement
from gpudist.exchange.autograd import apply_handwritten, move
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, cells, operations, partition_of, random
from tests.pool import distributed


def moving(operator: ops.Broadcast, x: torch.Tensor) -> Movement:
    return operator.movement(x)


def placeholder(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.empty(2, 0, dtype=dtype)


@distributed(ranks=3)
def test_one_node_carries_several_pairs_in_one_group(P_world: Partition) -> None:
    """A layer's input, weight and bias: one node, one group forward, one backward, one again."""
    P_x = P_world.create_partition_inclusive([1])
    halo = ops.HaloExchange(partition_of(P_world, range(3), [1, 3]), halo=((1, 1),))
    weight, bias = ops.Broadcast(P_x, P_world), ops.Broadcast(P_x, P_world)
    inputs = [random((2, 3), 1), placeholder(), placeholder()]
    if P_x.active:
        inputs[1:] = [random((2, 2), 2), random((4,), 3)]
    inputs = [x.requires_grad_() for x in inputs]
    movements = [moving(op, x) for op, x in zip((halo, weight, bias), inputs, strict=True)]
    started = operations(P_world)
    outputs = move(movements, inputs)
    assert operations(P_world) - started == 2
    assert len({y.grad_fn for y in outputs}) == 1
    assert_same(outputs[1].detach(), random((2, 2), 2))
    assert_same(outputs[2].detach(), random((4,), 3))
    loss = sum(y.pow(3).sum() for y in outputs)
    started = operations(P_world)
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    assert operations(P_world) - started == 2
    started = operations(P_world)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in gradients), inputs)
    # Through the adjoint's node, then through the forward's.
    assert operations(P_world) - started == 3
    if P_x.active:
        w = random((2, 2), 2)
        torch.testing.assert_close(gradients[1].detach(), 9 * w**2)
        torch.testing.assert_close(second[1], 2 * 9 * w**2 * 18 * w)


@distributed(ranks=3)
def test_output_requires_grad_iff_its_input_does(P_world: Partition) -> None:
    """Only that output of a node is differentiable whose own input requires grad."""
    P_x = P_world.create_partition_inclusive([0])
    first, second = ops.Broadcast(P_x, P_world), ops.Broadcast(P_x, P_world)
    x = cells((2, 3)) if P_x.active else placeholder()
    for wanted in ((True, False), (False, True), (False, False), (True, True)):
        inputs = [x.detach().requires_grad_(w) for w in wanted]
        outputs = move([moving(first, inputs[0]), moving(second, inputs[1])], inputs)
        assert tuple(y.requires_grad for y in outputs) == wanted
        if any(wanted):
            sum(y.sum() for y in outputs if y.requires_grad).backward()
        for x_in, w in zip(inputs, wanted, strict=True):
            assert (x_in.grad is not None) == w
    with torch.no_grad():
        y = move([moving(first, inputs[0])], [inputs[0]])[0]
        assert not y.requires_grad


@distributed(ranks=2)
def test_output_of_a_placeholder_that_requires_grad(P_world: Partition) -> None:
    """The placeholder decides on the receiver, as the block does on the sender."""
    P_x = P_world.create_partition_inclusive([0])
    x = cells((2, 3)) if P_x.active else placeholder()
    assert ops.broadcast(x.requires_grad_(), P_x, P_world).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@distributed(ranks=3)
def test_gradient_of_a_placeholder(P_world: Partition, dtype: torch.dtype) -> None:
    """The gradient has the placeholder's shape and dtype, and is the adjoint's own output."""
    P_x = P_world.create_partition_inclusive([0])
    x = cells((2, 3)) if P_x.active else torch.empty(5, 0, dtype=dtype)
    x.requires_grad_()
    y = ops.broadcast(x, P_x, P_world)
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    assert gradient.shape == x.shape
    assert gradient.dtype == x.dtype
    assert gradient.grad_fn is not None
    started = operations(P_world)
    (second,) = torch.autograd.grad(gradient.pow(2).sum(), x)
    assert operations(P_world) - started == 3
    assert second.shape == x.shape
    if P_x.active:
        torch.testing.assert_close(second, 2 * 6 * 6 * x.detach())


@pytest.mark.parametrize("use_reentrant", [True, False])
@distributed(ranks=3)
def test_every_rank_recomputes_under_checkpointing(P_world: Partition, use_reentrant: bool) -> None:
    """A rank that saves no tensor but the movement's own empty one recomputes too."""
    P_x = P_world.create_partition_inclusive([0])
    layer = ops.Broadcast(P_x, P_world)
    calls: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(x) + 1

    x = (cells((2, 3)) if P_x.active else placeholder()).requires_grad_()
    y = checkpoint(body, x, use_reentrant=use_reentrant)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2
    if P_x.active:
        assert_same(x.grad, torch.full((2, 3), 3.0).double())


@distributed(ranks=2)
def test_padding_is_no_part_of_the_linear_map(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    halo = ops.HaloExchange(P_x, halo=((1, 1),), padding_value=7.0)
    x = torch.ones(2).requires_grad_()
    y = halo(x)
    ends = [0] if P_world.rank == 0 else [3]
    assert y[ends].tolist() == [7.0]
    gradient = torch.ones(4, requires_grad=True)
    (adjoint,) = torch.autograd.grad(y, x, gradient, create_graph=True)
    assert adjoint.tolist() == ([1.0, 2.0] if P_world.rank == 0 else [2.0, 1.0])
    (again,) = torch.autograd.grad(adjoint, gradient, torch.ones(2))
    assert again[ends].tolist() == [0.0]


@distributed(ranks=2)
def test_gradient_of_a_tensor_that_stays_unused_is_zero(P_world: Partition) -> None:
    """Off the root a broadcast ignores its input, even one with cells."""
    root = P_world.create_partition_inclusive([0])
    broadcast = ops.Broadcast(root, P_world)
    assert P_world.rank is not None
    x = (cells((3,)) + P_world.rank).requires_grad_()
    y = broadcast(x)
    assert_same(y, cells((3,)))
    for _ in range(5):
        _ = [torch.full((3,), 7.0).double() for _ in range(50)]  # what new memory would hold
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert_same(gradient, torch.full((3,), 2.0 if P_world.rank == 0 else 0.0).double())


class _Square:
    """The square, by hand."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return x * x, ()

    def backward(self, gradient: Any, inputs: Any, kept: Any, needs: Any) -> list[torch.Tensor]:
        return [2 * inputs[0] * gradient]

    def compose(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_hook_of_an_input_runs_once(create_graph: bool) -> None:
    x = torch.tensor([3.0], requires_grad=True)
    x.register_hook(lambda gradient: 10 * gradient)
    y = apply_handwritten(_Square(), x)
    (first,) = torch.autograd.grad(y, x, create_graph=create_graph)
    assert first.tolist() == [60.0]
    if create_graph:
        (second,) = torch.autograd.grad(first, x)
        assert second.tolist() == [200.0]
