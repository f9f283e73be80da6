"""Operators with DistDL's arguments, on blocks that change from call to call."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpudist.compat import distdl
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition, MPIPartition
from gpudist.compat.distdl.nn.padnd import PadNd
from gpudist.compat.distdl.nn.unpadnd import UnpadNd
from gpudist.compat.distdl.utilities.slicing import (
    assemble_slices,
    compute_start_index,
    compute_stop_index,
    compute_subshape,
)
from gpudist.compat.distdl.utilities.torch import zero_volume_tensor
from gpudist.errors import PartitionError, ShapeError
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.pool import distributed

LOCAL = ("loopback", "host")


def grid_of(P: MPIPartition, ranks: Sequence[int], shape: Sequence[int]) -> MPICartesianPartition:
    return P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape).double()


def block_of(x: torch.Tensor, P: MPICartesianPartition) -> torch.Tensor:
    start, stop = (f(P.shape, P.index, x.shape) for f in (compute_start_index, compute_stop_index))
    return x[assemble_slices(start, stop)].clone()


@distributed(ranks=4)
def test_scatter_compute_gather(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_0, P_x = grid_of(P, [0], [1, 1]), grid_of(P, [1, 2, 3], [1, 3])
    manager = MPIBufferManager()
    scatter = distdl.nn.DistributedTranspose(P_0, P_x, buffer_manager=manager)
    gather = distdl.nn.Repartition(P_x, P_0)
    # Every call has another shape, and the placeholders do not show the batch.
    for batch, features in ((2, 7), (3, 7), (3, 4)):
        x = counted(batch, features).requires_grad_() if P_0.active else zero_volume_tensor()
        part = scatter(x)
        if P_x.active:
            assert part.shape == tuple(compute_subshape(P_x.shape, P_x.index, [batch, features]))
        y = gather(part * 2)
        assert y.requires_grad
        y.backward(torch.ones_like(y))
        if P_0.active:
            assert torch.equal(y, 2 * x) and x.grad is not None
            assert torch.equal(x.grad, torch.full_like(x, 2))


@distributed(ranks=4, transports=LOCAL)
def test_train_and_evaluate_in_turns(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_0, P_x = grid_of(P, [3], [1]), grid_of(P, range(4), [1, 4])
    broadcast, total = distdl.nn.Broadcast(P_0, P_x), distdl.nn.SumReduce(P_x, P_0)
    for needs_gradient in (True, False, True):
        x = torch.ones(2, 3) if P_0.active else zero_volume_tensor(2)
        y = broadcast(x.requires_grad_(needs_gradient))
        assert torch.equal(y, torch.ones(2, 3)) and y.requires_grad == needs_gradient
        z = total(y)
        assert z.shape == ((2, 3) if P_0.active else (2, 0))
        if needs_gradient:
            z.sum().backward()
            assert not P_0.active or torch.equal(x.grad, torch.full((2, 3), 4.0))  # type: ignore[arg-type]


@distributed(ranks=4, transports=LOCAL)
def test_adjoints(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_few, P_x = grid_of(P, [2, 0], [2, 1]), grid_of(P, range(4), [2, 2])
    few = torch.randn(3, 2).double() if P_few.active else zero_volume_tensor(3, torch.float64)
    assert_adjoint(distdl.nn.Broadcast(P_few, P_x), few, P_world)
    assert_adjoint(distdl.nn.SumReduce(P_x, P_few), torch.randn(3, 2).double(), P_world)
    assert_adjoint(distdl.nn.AllSumReduce(P_x, (1,)), torch.randn(3, 2).double(), P_world)
    assert_adjoint(distdl.nn.AllSumReduce(P_x, axes_keep=(0,)), torch.randn(3).double(), P_world)
    placeholder = distdl.nn.Broadcast(P_x, P_x, transpose_src=True, preserve_batch=False)
    assert_adjoint(placeholder, torch.randn(3, 2).double(), P_world)


@distributed(ranks=4, transports=("loopback",))
def test_partitions_that_do_not_fit(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x = P.create_cartesian_topology_partition([1, 4, 1, 1])
    with pytest.raises(ValueError, match="need one axis per dim"):
        distdl.nn.Repartition(P_x, grid_of(P, [0, 1], [1, 2]))
    with pytest.raises(ValueError, match="does not broadcast"):
        distdl.nn.Broadcast(P_x, grid_of(P, [0, 1], [1, 2, 1, 1]))
    with pytest.raises(PartitionError, match=r"P_x is .*; it takes a MPIPartition"):
        distdl.nn.Broadcast(P_x.partition, P_x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer_manager is 1"):
        distdl.nn.Repartition(P_x, P_x, buffer_manager=1)  # type: ignore[arg-type]
    wrong = distdl.nn.Repartition(P_x, grid_of(P, [2, 3], [1, 1, 1, 2]))
    with pytest.raises(ValueError, match="3 dims"):
        wrong(torch.zeros(4, 5, 5))


def halos_of(P: MPICartesianPartition, per_dim: Sequence[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Return the widths ``(left, right)`` of this worker per dim, without ghosts at the edge."""
    widths = np.array(per_dim)
    widths[P.index == 0, 0] = 0
    widths[P.index == P.shape - 1, 1] = 0
    return widths


@distributed(ranks=6)
def test_halo_exchange_takes_four_arguments(P_world: Partition) -> None:
    P_x = MPIPartition(P_world).create_cartesian_topology_partition([1, 1, 2, 3])
    halo = halos_of(P_x, [(0, 0), (0, 0), (1, 2), (2, 1)])
    x = counted(1, 2, 7, 8)
    own = block_of(x, P_x)
    layer = distdl.nn.HaloExchange(P_x, halo, halo.copy(), halo.copy())
    padded = PadNd(halo)(own)
    before = padded.clone()
    y = layer(padded)
    start = compute_start_index(P_x.shape, P_x.index, x.shape) - halo[:, 0]
    stop = compute_stop_index(P_x.shape, P_x.index, x.shape) + halo[:, 1]
    # Corners come too.
    assert torch.equal(y, x[assemble_slices(start, stop)])
    assert torch.equal(padded, before)
    assert_adjoint(layer, padded, P_world)
    # A gradient that is one number in memory.
    padded.requires_grad_()
    layer(padded).sum().backward()
    assert padded.grad is not None
    assert P_x.allreduce_data(padded.grad.sum().item()) == P_x.allreduce_data(y.numel())


@distributed(ranks=3, transports=LOCAL)
def test_halos_that_differ_along_an_axis(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x = grid_of(P, [0, 2], [1, 2])
    widths = None
    if P_x.active:
        # Only one side has ghosts, and the edge has cells to keep.
        widths = np.array([[0, 0], [[1, 2], [0, 0]][int(P_x.rank)]])
    layer = distdl.nn.HaloExchange(P_x, widths, widths, None)
    for rows in (1, 3):
        x = torch.full((rows, (6, 3)[P_x.rank] if P_x.active else 0), P_x.rank + 1.0)
        y = layer(x)
        if P_x.rank == 0:
            assert y.tolist() == [[1.0] * 4 + [2.0] * 2] * rows
        else:
            assert torch.equal(y, x) and y is not x


@distributed(ranks=4, transports=("loopback",))
def test_halos_that_do_not_fit(P_world: Partition) -> None:
    P_x = MPIPartition(P_world).create_cartesian_topology_partition([2, 2])
    widths = np.array([[0, 0], [0, 0]])
    if P_world.rank == 3:
        widths[0, 0] = 1
    layer = distdl.nn.HaloExchange(P_x, widths, widths, widths)
    with pytest.raises(ShapeError, match=r"shape \[2\]; it must be \[2, 2\]"):
        distdl.nn.HaloExchange(P_x, widths[0], widths[0], widths[0])
    with pytest.raises(ShapeError, match=r"HaloExchange, dim 0: .* different halos or blocks"):
        layer(torch.zeros(3, 2))


def test_pad_and_unpad() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    widths = np.array([[1, 0], [2, 1]])
    padded = PadNd(widths, value=5)(x)
    assert torch.equal(padded, F.pad(x, (2, 1, 1, 0), value=5))
    assert torch.equal(UnpadNd(widths)(padded), x)
    assert torch.equal(PadNd(None)(x), x) and torch.equal(UnpadNd(None)(x), x)
    assert torch.autograd.gradcheck(UnpadNd(widths, value=0), [padded.detach().requires_grad_()])


@distributed(ranks=4, transports=LOCAL)
def test_overlaps_of_a_repartition(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x, P_y = grid_of(P, [0, 1], [2, 1]), grid_of(P, [1, 2, 3], [1, 3])
    layer = distdl.nn.Repartition(P_x, P_y)
    assert layer.P_x_to_y_overlaps == layer.P_y_to_x_overlaps == []
    # The third block of two columns is empty.
    for whole in (counted(5, 7), counted(3, 2)):
        x = block_of(whole, P_x) if P_x.active else zero_volume_tensor(dtype=torch.float64)
        y = layer(x)
        rows, columns = whole.tensor_split(2, 0), whole.tensor_split(3, 1)
        check_overlaps(layer.P_x_to_y_overlaps, x, columns if P_x.active else (), P.rank - 1)
        check_overlaps(layer.P_y_to_x_overlaps, y, rows if P_y.active else (), P.rank)


def check_overlaps(overlaps: Any, x: torch.Tensor, others: Sequence[Any], own: int) -> None:
    """Compare with the cells, all different, that ``x`` shares with each of the other blocks."""
    assert len(overlaps) == len(others)
    for rank, (other, overlap) in enumerate(zip(others, overlaps, strict=True)):
        cells, shape, partner = overlap
        common = {*x.flatten().tolist()} & {*other.flatten().tolist()}
        assert (cells is None) == (not common)
        if common:
            assert {*x[cells].flatten().tolist()} == common and tuple(x[cells].shape) == shape
            assert (partner == "self") == (rank == own)


@distributed(ranks=4, transports=LOCAL)
def test_grid_smaller_than_its_partition(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_x = P.create_cartesian_topology_partition(np.array([1, 3]))
    assert P_x.active == (P.rank < 3) and P_x.shape.tolist() == [1, 3]
    assert P_x.rank == (P.rank if P_x.active else distdl.MPI.PROC_NULL)
    y = distdl.nn.AllSumReduce(P_x, axes_reduce=(1,))(torch.ones(2))
    assert y.tolist() == ([3.0, 3.0] if P_x.active else [1.0, 1.0])
    with pytest.raises(PartitionError, match="holds 6 workers but the partition has 4"):
        P.create_cartesian_topology_partition([2, 3])
