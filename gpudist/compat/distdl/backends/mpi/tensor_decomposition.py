"""Shapes of the blocks of a distributed tensor."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition, MPIPartition


def compute_subtensor_shapes_unbalanced(
    local_tensor_structure: Any, P_in: MPICartesianPartition, P_out: MPIPartition | None = None
) -> NDArray[Any] | None:
    """Return the shapes of all blocks of a tensor split over ``P_in``. Collective.

    Args:
        local_tensor_structure: this worker's block, or its structure.
        P_in: partition of the tensor, one axis per dim.
        P_out: partition that contains ``P_in``; its members get the shapes too.

    Returns:
        Array of shape ``[*P_in.shape, dims]``; ``None`` on workers of neither partition.
    """
    shapes = None
    if P_in.active:
        shapes = P_in.allgather_data(list(local_tensor_structure.shape))
        shapes = shapes.reshape(*P_in.shape, P_in.dim)
    if P_out is not None and P_out.active:
        shapes = P_out.broadcast_data(shapes, P_data=P_in)
    return shapes
