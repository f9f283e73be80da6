"""Name of DistDL's selected backend: ``distdl.backend.backend``."""

from gpudist.compat.distdl.backends import mpi as backend

__all__ = ["backend"]
