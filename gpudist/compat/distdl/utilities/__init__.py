"""Helpers of DistDL for shapes, indices and slices."""

from gpudist.compat.distdl.utilities import (
    debug as debug,
    index_tricks as index_tricks,
    slicing as slicing,
    tensor_decomposition as tensor_decomposition,
    torch as torch,
)
