"""Shift: what is special to it beside the contract of all operators."""

# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpudist import ops
from gpudist.errors import PartitionError
from gpudist.ops import Shift, shift
from gpudist.world.partition import Partition
from tests.nn.compare import own_block
from tests.pool import distributed

WHOLE = torch.arange(8 * 9, dtype=torch.float64).reshape(8, 9)


@pytest.mark.parametrize("steps", [(1, 0), (0, 1), (-1, 2), (5, -7), (0, 0)], ids=str)
@distributed(ranks=6)
def test_rolls_a_tensor_of_equal_blocks(P_world: Partition, steps: tuple[int, int]) -> None:
    P_x = P_world.grid(2, 3)
    y = shift(own_block(WHOLE, P_x), P_x, steps)
    rolled = WHOLE.roll((steps[0] * 4, steps[1] * 3), (0, 1))
    assert torch.equal(y, own_block(rolled, P_x))
    assert torch.equal(shift(y, P_x, [-step for step in steps]), own_block(WHOLE, P_x))


@distributed(ranks=4)
def test_uneven_and_empty_blocks_move_whole(P_world: Partition) -> None:
    P_x = P_world.grid(4)
    x = torch.full((P_world.rank, 2), float(P_world.rank))
    sender = (P_world.rank - 1) % 4
    assert torch.equal(shift(x, P_x, [1]), torch.full((sender, 2), float(sender)))


@distributed(ranks=4, transports=("loopback",))
def test_arrays_and_workers_outside(P_world: Partition) -> None:
    P_x = P_world.grid(2)
    x = np.full(3, P_world.rank)
    y = shift(x, P_x, [1])
    assert isinstance(y, np.ndarray)
    assert list(y) == [1 - P_world.rank if P_world.rank < 2 else P_world.rank] * 3


@distributed(ranks=4, transports=("loopback",))
def test_steps_fit_the_partition(P_world: Partition) -> None:
    P_x = P_world.grid(2, 2)
    with pytest.raises(PartitionError, match=r"steps is \[1\]; give one number for each of the 2"):
        Shift(P_x, [1])
    assert repr(ops.Shift(P_x, [0, -1])) == "Shift([2, 2], steps=[0, -1])"
