"""The invariant regions: a value is the same everywhere, and its gradient counts once."""

from __future__ import annotations

import pytest
import torch

from gpudist import invariant_sum
from gpudist.errors import PartitionError
from gpudist.nn import invariant_copy
from gpudist.world.partition import Partition
from tests.pool import distributed


def part_of(P: Partition) -> torch.Tensor:
    assert P.rank is not None
    return torch.tensor([1.0, 2.0], dtype=torch.float64) * (P.rank + 1)


@distributed(ranks=[1, 3])
def test_sum(P_world: Partition) -> None:
    x = part_of(P_world).requires_grad_()
    total = sum(range(1, P_world.size + 1))
    y = invariant_sum(x, P_world)
    assert y.tolist() == [total, 2 * total]
    y.backward(torch.tensor([3.0, 5.0], dtype=torch.float64))
    assert x.grad is not None and x.grad.tolist() == [3, 5]


@distributed(ranks=3)
def test_double_backward_of_the_sum_is_an_all_sum(P_world: Partition) -> None:
    x = part_of(P_world).requires_grad_()
    cotangent = torch.ones(2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(invariant_sum(x, P_world), x, cotangent, create_graph=True)
    assert torch.equal(gradient, cotangent)
    gradient.backward(part_of(P_world))
    assert cotangent.grad is not None and cotangent.grad.tolist() == [6, 12]


@distributed(ranks=3)
def test_copy(P_world: Partition) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = invariant_copy(x, P_world)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()
    y.backward(part_of(P_world))
    assert x.grad is not None and x.grad.tolist() == [6, 12]


@distributed(ranks=3)
def test_double_backward_of_the_copy_is_the_identity(P_world: Partition) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    cotangent = part_of(P_world).requires_grad_()
    (gradient,) = torch.autograd.grad(invariant_copy(x, P_world), x, cotangent, create_graph=True)
    assert gradient.tolist() == [6, 12]
    gradient.backward(torch.tensor([3.0, 5.0], dtype=torch.float64))
    assert cotangent.grad is not None and cotangent.grad.tolist() == [3, 5]


@distributed(ranks=4)
def test_a_region_gives_the_sequential_gradient(P_world: Partition) -> None:
    """Copy in, different parts of one result, sum out: value and gradient count once."""
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    parts = invariant_copy(x, P_world) * part_of(P_world)
    invariant_sum(parts, P_world).pow(2).sum().backward()
    whole = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (whole * torch.tensor([10.0, 20.0])).pow(2).sum().backward()
    assert x.grad is not None and whole.grad is not None
    torch.testing.assert_close(x.grad, whole.grad, rtol=1e-14, atol=0)


@distributed(ranks=4)
def test_some_workers(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive([3, 1])
    if P.active:
        assert invariant_sum(part_of(P), P).tolist() == [3, 6]
        return
    x = torch.ones(2)
    with pytest.raises(PartitionError, match="invariant_sum: this worker is not a member"):
        invariant_sum(x, P)
    with pytest.raises(PartitionError, match="invariant_copy: this worker is not a member"):
        invariant_copy(x, P)


@distributed(ranks=4)
def test_the_sum_is_bitwise_equal_on_all_workers(P_world: Partition) -> None:
    torch.manual_seed(P_world.rank or 0)
    y = invariant_sum(torch.randn(100), P_world)
    bits = P_world.allgather_data(y.view(torch.int32).tolist())
    assert all(row == bits[0] for row in bits)
