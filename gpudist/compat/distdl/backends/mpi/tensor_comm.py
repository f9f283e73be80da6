"""Structure of a distributed tensor, assembled from those of its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition, MPIPartition
from gpudist.compat.distdl.utilities.torch import TensorStructure

# In the order of their names, which is the same on all ranks.
_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


def assemble_global_tensor_structure(
    local_tensor_structure: Any, P_in: MPICartesianPartition, P_out: MPIPartition | None = None
) -> TensorStructure:
    """Return the shape, dtype and ``requires_grad`` of a tensor split over ``P_in``. Collective.

    Args:
        local_tensor_structure: this worker's block, or its structure.
        P_in: partition of the tensor, one axis per dim.
        P_out: partition that contains ``P_in``; its members get the structure too.

    Returns:
        Structure with an array as shape; empty on workers of neither partition.
    """
    structure = TensorStructure()
    facts = None
    if P_in.active:
        block = local_tensor_structure
        sizes = P_in.allgather_data(list(block.shape)).reshape(*P_in.shape, P_in.dim)
        lines = [
            sizes[(*P_in.index[:d], slice(None), *P_in.index[d + 1 :], d)] for d in range(P_in.dim)
        ]
        facts = [_DTYPES.index(block.dtype), block.requires_grad, *(line.sum() for line in lines)]
    if P_out is not None and P_out.active:
        facts = P_out.broadcast_data(facts, P_data=P_in)
    if facts is not None:
        dtype, requires_grad, *shape = facts
        structure.shape, structure.dtype = np.array(shape), _DTYPES[dtype]
        structure.requires_grad = bool(requires_grad)
    return structure
