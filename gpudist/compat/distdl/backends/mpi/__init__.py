"""The backend of DistDL that programs name, over the transports of gpudist."""

from gpudist.compat.distdl.backends.mpi import (
    buffer as buffer,
    partition as partition,
    tensor_comm as tensor_comm,
    tensor_decomposition as tensor_decomposition,
)
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager as BufferManager
from gpudist.compat.distdl.backends.mpi.partition import (
    MPICartesianPartition as CartesianPartition,
    MPIPartition as Partition,
)
from gpudist.compat.distdl.backends.mpi.tensor_comm import (
    assemble_global_tensor_structure as assemble_global_tensor_structure,
)

__all__ = [
    "BufferManager",
    "CartesianPartition",
    "Partition",
    "assemble_global_tensor_structure",
]
