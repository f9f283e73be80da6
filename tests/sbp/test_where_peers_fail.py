"""Global tensors where OneFlow and DTensor fail, stop the process, or compute something else.

Versions: OneFlow 0.9 and the reports of its users; DTensor of torch 2.13.
"""

# Operators of global tensors are typed as torch types them: their results are Tensors.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.sbp import Placement, to_global
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.compare import assert_global, global_of
from tests.sbp.parts import B, P, S, part_of, random


@distributed(ranks=2, transports=("loopback", "host"))
def test_wrong_attributes_are_an_error_and_the_ranks_live_on(P_world: Partition) -> None:
    """OneFlow (issue 9942): attributes that do not fit end the process with SIGBUS."""
    placement = Placement("cpu", [0, 1], P_world)
    x = torch.ones(4, 2)
    with pytest.raises(PartitionError, match="has 2 dims"):
        to_global(x, placement, S(2))
    with pytest.raises(PartitionError, match="each of the 1 axes"):
        to_global(x, placement, (S(0), B))
    with pytest.raises(PartitionError, match="count it from the front"):
        to_global(x, placement, S(-1))
    y = to_global(x, placement, S(0))
    with pytest.raises(PartitionError, match="has 2 dims"):
        y.to_global(sbp=S(5))
    torch.testing.assert_close(y.full_tensor(), torch.ones(8, 2))


@distributed(ranks=4, transports=("loopback",))
def test_every_pair_of_attributes_is_boxed(P_world: Partition) -> None:
    """OneFlow and DTensor do not support some of these pairs.

    OneFlow (issues 6292, 7198) does not support (split, partial sum) to (split, split), nor many
    others. DTensor refuses every conversion to partial sums.
    """
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    x = random((5, 3))
    kinds = S(0), S(1), B, P
    assert_global(global_of(x, placement, (S(0), P)).to_global(sbp=(S(0), S(0))), x)
    for source, target in product(product(kinds, repeat=2), repeat=2):
        assert_global(global_of(x, placement, source).to_global(sbp=target), x)


@distributed(ranks=2, transports=("loopback",))
def test_stack_of_split_columns_has_the_right_gradient(P_world: Partition) -> None:
    """OneFlow (issue 8194): the gradient of such a stack comes back transposed."""
    placement = Placement("cpu", [0, 1], P_world)
    a, b = (global_of(random((2, 2), i), placement, (S(1),), True) for i in (0, 1))
    start = torch.arange(8.0, dtype=torch.float64).reshape(2, 2, 2)
    y = torch.stack((a, b), dim=0)
    assert y.sbp == (S(2),)
    y.backward(global_of(start, placement, (B,)))
    assert a.grad is not None and b.grad is not None
    assert a.grad.sbp == (S(1),)
    assert_global(a.grad, start[0])
    assert_global(b.grad, start[1])


@distributed(ranks=2, transports=("loopback", "host"))
def test_uneven_blocks_are_checked(P_world: Partition) -> None:
    """DTensor: ``from_local`` of 3 and 5 cells passes, and ``full_tensor`` then aborts in gloo."""
    placement = Placement("cpu", [0, 1], P_world)
    rank = P_world.rank or 0
    with pytest.raises(ShapeError, match=r"rank 0 has shape \[3\].*must be \[4\]"):
        to_global(torch.ones([3, 5][rank]), placement, S(0))
    x = random((7,))
    y = to_global(part_of(x, placement.layout((S(0),), (7,)), rank), placement, S(0))
    torch.testing.assert_close(y.full_tensor(), x)


@distributed(ranks=4, transports=("loopback",))
def test_balanced_blocks_leave_nobody_without_work(P_world: Partition) -> None:
    """DTensor cuts 6 cells over 4 ranks in 2, 2, 2 and none."""
    placement = Placement("cpu", [0, 1, 2, 3], P_world)
    y = global_of(random((6,)), placement, (B,)).to_global(sbp=S(0))
    assert y.to_local().shape == ([2, 2, 1, 1][P_world.rank or 0],)


@distributed(ranks=3, transports=("loopback",))
def test_terms_to_local_and_back_keep_their_gradient(P_world: Partition) -> None:
    """DTensor (pytorch issue 172932): ``to_local`` and ``from_local`` change the gradient.

    They should not, since they only wrap partial sums. A gradient from copies is treated as if each
    rank had all of it.
    """
    placement = Placement("cpu", [0, 1, 2], P_world)
    x, w = random((4, 3)), random((3, 2), 1)
    whole = [t.clone().requires_grad_() for t in (x, w)]
    (whole[0] @ whole[1]).tanh().sum().backward()
    for middle in (P, B, S(0)):
        a = global_of(x, placement, (S(1),), True)
        b = global_of(w, placement, (S(0),), True)
        y: Any = (a @ b).to_global(sbp=middle)
        z: Any = to_global(y.to_local(), placement, middle).to_global(sbp=B).tanh()
        z.backward(torch.ones(4, 2, dtype=torch.float64))
        for own, other in zip((a, b), whole, strict=True):
            assert own.grad is not None and other.grad is not None
            assert_global(own.grad, other.grad)


@distributed(ranks=4, transports=("loopback",))
def test_conversions_pass_the_dot_test(P_world: Partition) -> None:
    """DTensor: from sums or blocks to copies, the gradient of ``to_local`` lacks a sum."""
    placement = Placement("cpu", [[0, 1], [2, 3]], P_world)
    for sbp in ((P, S(0)), (S(0), P), (S(0), S(1))):
        x = part_of(random((5, 2)), placement.layout(sbp, (5, 2)), P_world.rank or 0)
        assert_adjoint(lambda t, a=sbp: to_global(t, placement, a).full_tensor(), x, P_world)


@distributed(ranks=4, transports=("loopback",))
def test_other_arrays_of_ranks_have_a_backward(P_world: Partition) -> None:
    """OneFlow (issue 7224): none from one axis to two. DTensor: no messages between meshes."""
    line = Placement("cpu", [0, 1, 2, 3], P_world)
    square = Placement("cpu", [[0, 1], [2, 3]], P_world)
    pair = Placement("cpu", [3, 1], P_world)
    x, weight = random((6, 3)), random((6, 3), 1)
    y = global_of(x, line, (S(0),), True)
    z: Any = y.to_global(square, (S(1), B)) * global_of(weight, square, (S(1), B))
    z.to_global(pair, P).backward(torch.ones_like(x))
    assert y.grad is not None
    assert_global(y.grad, weight)


@distributed(ranks=2, transports=("loopback",))
def test_blocks_are_joined_and_copies_are_cut(P_world: Partition) -> None:
    """OneFlow (issue 9704): users call ``to_global`` on a local batch to split it. It
    joins the ranks' blocks; copies on each rank are split without a message."""
    placement = Placement("cpu", [0, 1], P_world)
    batch = random((4, 3))
    assert tuple(to_global(batch, placement, S(0)).shape) == (8, 3)
    copies = to_global(batch, placement, B)
    before = P_world.wire.recorder.count
    halves = copies.to_global(sbp=S(0))
    assert P_world.wire.recorder.count == before
    assert_global(halves, batch)
    assert halves.to_local().shape == (2, 3)
