"""Name under which DistDL's fork keeps its partitions."""

from gpudist.compat.distdl.backends.mpi.partition import (
    MPICartesianPartition as MPICartesianPartition,
    MPIPartition as MPIPartition,
)
