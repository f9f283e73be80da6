"""Backends of DistDL: both lead to the transports of gpudist."""

from gpudist.compat.distdl.backends import common as common, mpi as mpi

backend = mpi
