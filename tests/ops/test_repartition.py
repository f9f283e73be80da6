"""Repartition: every cell goes where the new cut puts it, and gradients return."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from gpudist import nn, repartition, zero_volume_tensor
from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.dense import (
    Tensors,
    assembled,
    assert_matches_dense,
    assert_same,
    blocks,
    cells,
    local_input,
    operations,
    partition_of,
    random,
)
from tests.pool import distributed


class Recut(NamedTuple):
    shape: tuple[int, ...]
    ranks_x: tuple[int, ...]
    shape_x: tuple[int, ...]
    ranks_y: tuple[int, ...]
    shape_y: tuple[int, ...]


CASES = {
    "other axis": Recut((7, 5), (0, 1, 2, 3), (4, 1), (0, 1, 2, 3), (1, 4)),
    "uneven grid": Recut((7, 9), (0, 1, 2, 3), (2, 2), (3, 1, 0), (3, 1)),
    "disjoint": Recut((5, 4), (0, 1), (2, 1), (3, 2), (1, 2)),
    "one to all": Recut((5, 4, 3), (2,), (1, 1, 1), (0, 1, 2, 3), (1, 2, 2)),
    "all to one": Recut((5, 4, 3), (0, 1, 2, 3), (2, 1, 2), (1,), (1, 1, 1)),
    "two inactive": Recut((6, 3), (3,), (1, 1), (1, 3), (1, 2)),
    "same cut": Recut((5, 4), (0, 1, 2, 3), (2, 2), (0, 1, 2, 3), (2, 2)),
    "same cut, other order": Recut((5, 4), (0, 1, 2, 3), (2, 2), (3, 2, 1, 0), (2, 2)),
    "more workers than cells": Recut((2, 3), (0, 1, 2, 3), (4, 1), (3, 2, 1, 0), (1, 4)),
    "no cells": Recut((0, 3), (0, 1), (2, 1), (1, 2), (1, 2)),
    "one worker": Recut((3, 2), (1,), (1, 1), (1,), (1, 1)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def inputs_on(case: Recut, x: torch.Tensor, size: int) -> Tensors:
    parts = dict(zip(case.ranks_x, blocks(x, case.shape_x), strict=True))
    return [parts.get(rank, x.new_empty(x.shape[0], 0)) for rank in range(size)]


def dense_recut(case: Recut, xs: Tensors) -> Tensors:
    x = assembled([xs[rank] for rank in case.ranks_x], case.shape_x)
    parts = dict(zip(case.ranks_y, blocks(x, case.shape_y), strict=True))
    return [
        parts[rank] if rank in parts
        else mine.new_empty(mine.shape[0], 0) if rank in case.ranks_x
        else mine.clone()
        for rank, mine in enumerate(xs)
    ]  # fmt: skip


def layer_on(P_world: Partition, case: Recut) -> nn.Repartition:
    P_x = partition_of(P_world, case.ranks_x, case.shape_x)
    P_y = partition_of(P_world, case.ranks_y, case.shape_y)
    return nn.Repartition(P_x, P_y)


@every_case
@distributed(ranks=4)
def test_cells_and_derivatives(P_world: Partition, case: Recut) -> None:
    layer = layer_on(P_world, case)
    numbered = inputs_on(case, cells(case.shape), 4)
    x = numbered[P_world.rank]
    before = x.clone()
    y = layer(x)
    assert_same(y, dense_recut(case, numbered)[P_world.rank])
    assert_same(x, before)
    assert y.numel() == 0 or y.data_ptr() != x.data_ptr()
    inputs = inputs_on(case, random(case.shape), 4)
    assert_matches_dense(layer, lambda xs: dense_recut(case, xs), inputs, P_world)
    if cells(case.shape).numel():
        assert_adjoint(layer, inputs[P_world.rank], P_world)


@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition) -> None:
    case = Recut((7, 9, 5), tuple(range(12)), (2, 3, 2), tuple(range(11, -1, -1)), (3, 1, 4))
    layer = layer_on(P_world, case)
    inputs = inputs_on(case, random(case.shape), 12)
    assert_matches_dense(layer, lambda xs: dense_recut(case, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank], P_world)


@pytest.mark.parametrize("sizes", [[5, 0, 1, 3], [1, 1, 6, 1], [0, 0, 0, 9]], ids=str)
@distributed(ranks=4)
def test_unbalanced_input(P_world: Partition, sizes: list[int]) -> None:
    """Blocks of any size make up the input; those of the output are balanced."""
    P_x = P_world.create_cartesian_topology_partition([1, 4])
    P_y = P_world.create_cartesian_topology_partition([2, 2])
    inputs = list(random((3, 9)).split(sizes, 1))

    def dense(xs: Tensors) -> Tensors:
        return blocks(torch.cat(xs, 1), [2, 2])

    assert_matches_dense(nn.Repartition(P_x, P_y), dense, inputs, P_world)


@pytest.mark.parametrize("preserve_batch", [True, False])
@distributed(ranks=3)
def test_zero_volume_output(P_world: Partition, preserve_batch: bool) -> None:
    P_x = partition_of(P_world, [0], [1, 1])
    P_y = partition_of(P_world, [1], [1, 1])
    x = cells((5, 2)) if P_x.active else zero_volume_tensor(3)
    y = repartition(x, P_x, P_y, preserve_batch)
    if P_world.rank == 0:
        assert_same(y, torch.empty((5, 0) if preserve_batch else (0,), dtype=torch.float64))
    else:
        assert_same(y, cells((5, 2)) if P_y.active else torch.empty(3, 0))


@distributed(ranks=3)
def test_smaller_last_batch_and_toggled_grad(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    P_y = partition_of(P_world, [2], [1, 1])
    layer = nn.Repartition(P_x, P_y)
    for batch, wanted, started in ((4, True, 2), (3, False, 1), (4, False, 1), (3, True, 1)):
        x = local_input(cells((batch, 5)), P_x).requires_grad_(wanted)
        before = operations(P_world)
        y = layer(x)
        assert operations(P_world) - before == started + 1
        assert y.requires_grad == wanted
        assert_same(y.detach(), cells((batch, 5)) if P_y.active else torch.empty(batch, 0).double())


@distributed(ranks=3)
def test_changed_block_is_refused_everywhere(P_world: Partition) -> None:
    P_x = partition_of(P_world, range(3), [1, 3])
    P_y = partition_of(P_world, range(3), [3, 1])
    layer = nn.Repartition(P_x, P_y)
    layer(torch.ones(3, 2))
    with pytest.raises(PlanMismatch, match=r"rank 1 .*\[3, 2\].*\[3, 7\].*global_shape="):
        layer(torch.ones(3, 7 if P_world.rank == 1 else 2))
        P_world.barrier()


@distributed(ranks=3)
def test_changed_shape_by_agreement_and_by_name(P_world: Partition) -> None:
    P_x = partition_of(P_world, range(3), [1, 3])
    P_y = partition_of(P_world, range(3), [3, 1])
    for shape in ((3, 7), (4, 2), (1, 9)):
        x = cells(shape)
        expected = blocks(x, [3, 1])[P_world.rank]
        mine = local_input(x, P_x)
        before = operations(P_world)
        assert_same(repartition(mine, P_x, P_y, shape="dynamic"), expected)
        after = operations(P_world)
        assert_same(repartition(mine, P_x, P_y, global_shape=shape), expected)
        assert operations(P_world) - after < after - before


@distributed(ranks=2)
def test_global_shape_that_is_not_the_tensors_is_refused(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    P_y = P_world.create_cartesian_topology_partition([2, 1])
    with pytest.raises(ShapeError, match=r"got \[3, 5\], another block; .* is \[3, 2\]"):
        repartition(torch.ones(3, 5), P_x, P_y, global_shape=(3, 4))
        P_world.barrier()


@distributed(ranks=4)
def test_blocks_that_are_no_cut_are_refused_everywhere(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2, 2])
    x = torch.ones(2, 5 if P_world.rank == 3 else 3)
    with pytest.raises(ShapeError, match=r"rank 1 has \[2, 3\].*\[2, 5\]"):
        repartition(x, P_x, P_x)


@distributed(ranks=2)
def test_partitions_with_different_numbers_of_axes_are_refused(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    with pytest.raises(PartitionError, match=r"\[1, 2\].*\[2\]"):
        nn.Repartition(P_x, P_world)
