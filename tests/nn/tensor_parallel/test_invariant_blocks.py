"""Invariant values that are cut, assembled, or come from copies whose gradients add up."""

from __future__ import annotations

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import invariant_copy, invariant_gather, invariant_scatter, invariant_share
from gpudist.world.partition import Partition
from tests.pool import distributed

F64 = torch.float64
LENGTHS = [2, 0, 3]


def block_of(P: Partition) -> torch.Tensor:
    assert P.rank is not None
    return torch.arange(10, dtype=F64).view(2, 5).split(LENGTHS, 1)[P.rank].clone()


@distributed(ranks=3)
def test_gather(P_world: Partition) -> None:
    """The gradient is the same on all workers: each takes its block, and nothing is summed."""
    gradient = torch.arange(10, dtype=F64).view(2, 5) + 1
    for lengths in (None, LENGTHS):
        x = block_of(P_world).requires_grad_()
        y = invariant_gather(x, P_world, 1, lengths=lengths)
        assert torch.equal(y, torch.arange(10, dtype=F64).view(2, 5))
        y.backward(gradient)
        assert x.grad is not None and torch.equal(x.grad, block_of(P_world) + 1)


@distributed(ranks=3)
def test_scatter(P_world: Partition) -> None:
    """The gradient is gathered from the workers' blocks."""
    x = torch.arange(10, dtype=F64).view(2, 5).requires_grad_()
    y = invariant_scatter(x, P_world, lengths=LENGTHS)
    assert torch.equal(y, block_of(P_world))
    y.backward(block_of(P_world) + 1)
    assert x.grad is not None and torch.equal(x.grad, x.detach() + 1)
    sizes = P_world.allgather_data([invariant_scatter(x.detach(), P_world, 1).shape[1]])
    assert sizes == [[2], [2], [1]]


@distributed(ranks=3, transports=["loopback"])
def test_double_backward(P_world: Partition) -> None:
    """Each one's is the other."""
    x, whole = block_of(P_world), torch.ones(2, 5, dtype=F64)
    cotangent = whole.clone().requires_grad_()
    y = invariant_gather(x.requires_grad_(), P_world, 1, lengths=LENGTHS)
    (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    gradient.backward(block_of(P_world))
    expected = torch.arange(10, dtype=F64).view(2, 5)
    assert cotangent.grad is not None and torch.equal(cotangent.grad, expected)
    cotangent = block_of(P_world).requires_grad_()
    y = invariant_scatter(whole.requires_grad_(), P_world, 1, lengths=LENGTHS)
    (gradient,) = torch.autograd.grad(y, whole, cotangent, create_graph=True)
    gradient.backward(expected)
    assert cotangent.grad is not None and torch.equal(cotangent.grad, block_of(P_world))


@distributed(ranks=4, transports=["loopback"])
def test_share(P_world: Partition) -> None:
    x = torch.tensor([2.0, 3.0], dtype=F64, requires_grad=True)
    y = invariant_share(x, P_world)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
    cotangent = torch.tensor([8.0, 4.0], dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
    assert gradient.tolist() == [2, 1]
    (again,) = torch.autograd.grad(gradient, cotangent, torch.ones(2, dtype=F64))
    assert again.tolist() == [1, 1]


@distributed(ranks=4, transports=["loopback"])
def test_there_and_back(P_world: Partition) -> None:
    """A share, then a copy: gradients that add up stay a sum, of equal parts."""
    x = torch.ones(2, dtype=F64, requires_grad=True)
    y = invariant_copy(invariant_share(x, P_world), P_world)
    y.backward(torch.full((2,), float(P_world.rank or 0), dtype=F64))
    assert x.grad is not None and x.grad.tolist() == [1.5, 1.5]


@distributed(ranks=3, transports=["loopback"])
def test_refusals(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive([0, 1])
    x = torch.ones(3)
    if not P.active:
        for operator in (invariant_gather, invariant_scatter, invariant_share):
            with pytest.raises(PartitionError, match="this worker is not a member"):
                operator(x, P)
    elif P.rank == 0:
        with pytest.raises(ShapeError, match=r"has 3 cells in dim 0, but lengths are \[1, 1\]"):
            invariant_scatter(x, P, lengths=[1, 1])
