"""DistDL's names, over gpudist: a DistDL program runs after changing its imports.

``import distdl`` becomes ``import gpudist.compat.distdl as distdl``, and ``from mpi4py import MPI``
becomes ``from gpudist.compat.distdl import MPI``. Modules and names are those of DistDL's MPI
releases, which a table makes from the files here; docs/howto/distdl.md lists what behaves
differently.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import TYPE_CHECKING, Any

from gpudist.compat.distdl import communicator, padding, partition, slicing, tensors
from gpudist.compat.distdl.adapter import MPIBufferManager
from gpudist.compat.distdl.communicator import MPI as MPI
from gpudist.compat.distdl.convolutions import CONVOLUTIONS
from gpudist.compat.distdl.halo_exchange import HaloExchange
from gpudist.compat.distdl.interpolate import Interpolate
from gpudist.compat.distdl.layers import LAYERS, DistributedUpsample
from gpudist.compat.distdl.loss import LOSSES
from gpudist.compat.distdl.module import Module
from gpudist.compat.distdl.repartition import Repartition

_LAYERS: dict[str, Any] = {
    **CONVOLUTIONS, **LAYERS, **LOSSES,
    "DistributedTranspose": Repartition,
    "DistributedUpsample": DistributedUpsample,
    "HaloExchange": HaloExchange,
    "Interpolate": Interpolate,
    "Module": Module,
    "Repartition": Repartition,
}  # fmt: skip
_NAMES: dict[str, Any] = {
    **vars(communicator), **vars(padding), **vars(slicing), **vars(tensors), **_LAYERS,
    "BufferManager": MPIBufferManager,
    "CartesianPartition": partition.MPICartesianPartition,
    "MPIBufferManager": MPIBufferManager,
    "MPICartesianPartition": partition.MPICartesianPartition,
    "MPIPartition": partition.MPIPartition,
    "Partition": partition.MPIPartition,
}  # fmt: skip


def _layers_with(part: str) -> str:
    return " ".join(name for name in _LAYERS if part in name)


_TABLE = {
    "backend": "",
    "backends": "",
    "backends.common": "",
    "backends.common.partition": "MPICartesianPartition MPIPartition",
    "backends.mpi": "BufferManager CartesianPartition Partition assemble_global_tensor_structure",
    "backends.mpi.buffer": "MPIBufferManager",
    "backends.mpi.partition": "MPICartesianPartition MPIPartition",
    "backends.mpi.tensor_comm": "assemble_global_tensor_structure",
    "backends.mpi.tensor_decomposition": "compute_subtensor_shapes_unbalanced",
    "functional": "ZeroVolumeCorrectorFunction",
    "nn": " ".join(_LAYERS),
    "nn.all_sum_reduce": "AllSumReduce",
    "nn.batchnorm": "DistributedBatchNorm",
    "nn.broadcast": "Broadcast",
    "nn.conv": " ".join(CONVOLUTIONS),
    "nn.conv_channel": _layers_with("ChannelConv"),
    "nn.conv_feature": _layers_with("FeatureConv"),
    "nn.conv_general": _layers_with("GeneralConv"),
    "nn.halo_exchange": "HaloExchange",
    "nn.interpolate": "Interpolate",
    "nn.linear": "DistributedLinear",
    "nn.loss": " ".join(LOSSES),
    "nn.module": "Module",
    "nn.padnd": "PadNd",
    "nn.pooling": _layers_with("Pool"),
    "nn.repartition": "Repartition",
    "nn.sum_reduce": "SumReduce",
    "nn.transpose": "DistributedTranspose",
    "nn.unpadnd": "UnpadNd",
    "nn.upsampling": "DistributedUpsample",
    "utilities": "",
    "utilities.debug": "print_sequential",
    "utilities.index_tricks": "cartesian_index_c cartesian_index_f",
    "utilities.slicing": (
        "assemble_index_filter assemble_slices compute_intersection compute_nd_slice_shape "
        "compute_nd_slice_volume compute_partition_intersection compute_start_index "
        "compute_stop_index compute_subshape filtered_range_index np range_index worker_layout"
    ),
    "utilities.tensor_decomposition": (
        "assemble_slices compute_intersection compute_subtensor_intersection_slice "
        "compute_subtensor_shapes_balanced compute_subtensor_start_indices "
        "compute_subtensor_stop_indices np range_index"
    ),
    "utilities.torch": (
        "TensorStructure distdl_padding_to_torch_padding np torch zero_volume_tensor"
    ),
}


def _module(path: str, names: str) -> Any:
    # All are packages, since a module of the table may contain others.
    module = module_from_spec(ModuleSpec(f"{__name__}.{path}", None, is_package=True))
    vars(module).update({name: _NAMES[name] for name in names.split()})
    parent, _, tail = module.__name__.rpartition(".")
    setattr(sys.modules[parent], tail, module)
    sys.modules[module.__name__] = module
    return module


MODULES = {path: _module(path, names) for path, names in _TABLE.items()}
"""Modules of DistDL, by their paths."""
for _place in (MODULES["backend"], MODULES["backends"]):
    _place.backend = MODULES["backends.mpi"]
Module._distdl_backend = MODULES["backends.mpi"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
