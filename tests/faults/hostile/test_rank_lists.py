"""Any list of ranks or shape gives the partition it describes, or a PartitionError."""

from __future__ import annotations

from operator import index
from typing import Any

import pytest
from hypothesis import given, settings

from gpudist.errors import PartitionError
from gpudist.transport.loopback import LoopbackWorld
from gpudist.world.partition import Partition
from tests.faults.hostile.anything import EXAMPLES, lists_of_anything

P_world = LoopbackWorld(4, 5.0).run(lambda transport: Partition(transport, range(4)))[0]


@settings(max_examples=EXAMPLES, deadline=None)
@given(ranks=lists_of_anything())
def test_ranks(ranks: Any) -> None:
    try:
        partition = P_world.create_partition_inclusive(ranks)
    except PartitionError as error:
        assert str(error)
        return
    assert list(partition.ranks) == [index(rank) for rank in ranks]
    assert len(set(partition.ranks)) == partition.size > 0


@settings(max_examples=EXAMPLES, deadline=None)
@given(shape=lists_of_anything())
def test_shapes(shape: Any) -> None:
    try:
        partition = P_world.create_cartesian_topology_partition(shape)
    except PartitionError as error:
        assert str(error)
        return
    assert list(partition.shape) == [index(extent) for extent in shape]


@pytest.mark.parametrize("ranks", [[0.9, 1.2], "01", ["1"], None, 3, [None]])
def test_nothing_is_rounded_or_read_as_a_number(ranks: Any) -> None:
    with pytest.raises(PartitionError, match="ranks must be a list of integers"):
        P_world.create_partition_inclusive(ranks)
