"""DistDL's names, over gpudist: a DistDL program runs after changing its imports.

``import distdl`` becomes ``import gpudist.compat.distdl as distdl``, and ``from mpi4py import MPI``
becomes ``from gpudist.compat.distdl import MPI``. Modules and names are those of DistDL's MPI
releases; docs/howto/distdl.md lists what behaves differently.
"""

from gpudist.compat.distdl import (
    backend as backend,
    backends as backends,
    functional as functional,
    nn as nn,
    utilities as utilities,
)
from gpudist.compat.distdl.backends.mpi.communicator import MPI as MPI
