"""Helpers for shapes, indices and slices, with the numbers that DistDL defines."""

# pyright: reportMissingImports=false
from __future__ import annotations

import numpy as np
import torch

from gpudist.compat import distdl
from gpudist.compat.distdl.backends.mpi.partition import MPIPartition
from gpudist.compat.distdl.backends.mpi.tensor_decomposition import (
    compute_subtensor_shapes_unbalanced,
)
from gpudist.compat.distdl.utilities import index_tricks, slicing, tensor_decomposition as cut
from gpudist.compat.distdl.utilities.torch import (
    TensorStructure,
    distdl_padding_to_torch_padding,
    zero_volume_tensor,
)
from gpudist.world.partition import Partition
from tests.pool import distributed


def test_zero_volume_tensor_takes_its_arguments_by_position() -> None:
    assert zero_volume_tensor().shape == (0,)
    x = zero_volume_tensor(3, torch.float64, True)
    assert x.shape == (3, 0) and x.dtype == torch.float64 and x.requires_grad
    assert distdl.utilities.torch.zero_volume_tensor(np.int64(2)).shape == (2, 0)  # type: ignore[arg-type]


def test_balanced_blocks() -> None:
    grid, shape = np.array([1, 3]), (5, 11)
    blocks = [(grid, [0, i], shape) for i in range(3)]
    assert [slicing.compute_subshape(*b).tolist() for b in blocks] == [[5, 4], [5, 4], [5, 3]]
    assert [slicing.compute_start_index(*b).tolist() for b in blocks] == [[0, 0], [0, 4], [0, 8]]
    assert [slicing.compute_stop_index(*b).tolist() for b in blocks] == [[5, 4], [5, 8], [5, 11]]
    assert slicing.compute_subshape(4, 3, 2).tolist() == [0]


def test_intersections() -> None:
    start, stop, shape = slicing.compute_intersection([0, 4], [3, 6], [2, 5], [9, 9])
    assert (start.tolist(), stop.tolist(), shape.tolist()) == ([2, 5], [3, 6], [1, 1])
    # Blocks [4, 8) of three and [6, 11) of two.
    assert slicing.compute_partition_intersection([3], [1], [2], [1], [11]) == (slice(2, 4),)
    assert slicing.compute_partition_intersection([3], [0], [2], [1], [11]) is None
    found = cut.compute_subtensor_intersection_slice([4], [8], [6], [11])
    assert found == (slice(2, 4),)
    assert cut.compute_subtensor_intersection_slice([0], [4], [6], [11]) is None


def test_slices_and_indices() -> None:
    slices = slicing.assemble_slices([1, 0], [3, 5])
    assert slices == (slice(1, 3), slice(0, 5))
    assert slicing.compute_nd_slice_volume(slices) == 10
    assert slicing.compute_nd_slice_shape(slices) == (2, 5)
    assert list(slicing.range_index((2, 2))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert slicing.worker_layout(np.array([2, 3])).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert list(slicing.filtered_range_index((2, 3), (1, None))) == [(1, 0), (1, 1), (1, 2)]
    assert slicing.assemble_index_filter((4, 3, 2), (1,)) == (None, 3, None)
    assert slicing.assemble_index_filter((4, 3, 2), (1,), invert=True) == (4, None, 2)
    assert index_tricks.cartesian_index_c((2, 3), (1, 0)) == 3
    assert index_tricks.cartesian_index_f((2, 3), (1, 2)) == 5
    assert index_tricks.cartesian_index_f((2, 3), (1, 0)) == 1
    assert distdl_padding_to_torch_padding(np.array([[1, 2], [3, 4]])) == (3, 4, 1, 2)


def test_shapes_of_all_blocks() -> None:
    structure = TensorStructure()
    structure.shape = [5, 3]
    shapes = cut.compute_subtensor_shapes_balanced(structure, np.array([2, 2]))
    assert shapes.tolist() == [[[3, 2], [3, 1]], [[2, 2], [2, 1]]]
    assert cut.compute_subtensor_start_indices(shapes)[1, 1].tolist() == [3, 2]
    assert cut.compute_subtensor_stop_indices(shapes)[0, 1].tolist() == [3, 3]


def test_structures_compare() -> None:
    x = torch.zeros(2, 3)
    assert TensorStructure(x) == TensorStructure(torch.ones(2, 3))
    assert TensorStructure(x) != TensorStructure(x.double())
    assert TensorStructure(x) != TensorStructure(torch.zeros(2, 3, requires_grad=True))
    assert TensorStructure(x) != TensorStructure(torch.zeros(3, 2)) and TensorStructure() != x


def test_star_imports_bring_what_programs_use() -> None:
    names: dict[str, object] = {}
    exec("from gpudist.compat.distdl.utilities.tensor_decomposition import *", names)
    exec("from gpudist.compat.distdl.utilities.torch import *", names)
    assert {"np", "assemble_slices", "TensorStructure", "compute_intersection"} <= names.keys()


@distributed(ranks=4, transports=("loopback", "host"))
def test_structure_of_a_distributed_tensor(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    base = P.create_partition_inclusive([2, 0])
    P_x = base.create_cartesian_topology_partition([1, 2])
    assemble = distdl.backend.backend.assemble_global_tensor_structure
    assert assemble is distdl.backend.backend.tensor_comm.assemble_global_tensor_structure
    x = zero_volume_tensor()
    if P_x.active:
        x = torch.zeros(3, 4 - P_x.rank, dtype=torch.float16, requires_grad=True)
    own = assemble(TensorStructure(x), P_x)
    known = assemble(x, P_x, P)
    shapes = compute_subtensor_shapes_unbalanced(x, P_x, P)
    assert shapes is not None and shapes.tolist() == [[[3, 4], [3, 3]]]
    for structure in [own, known] if P_x.active else [known]:
        assert structure.shape.tolist() == [3, 7]
        assert (structure.dtype, structure.requires_grad) == (torch.float16, True)
    if not P_x.active:
        assert own == TensorStructure() and compute_subtensor_shapes_unbalanced(x, P_x) is None
