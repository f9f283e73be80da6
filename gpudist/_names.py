"""Public names of gpudist, which the package takes from here when one is first used.

They are not all imported with the package, so that the command line starts without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudist import amp, data, nn, ops, recycling, sbp
from gpudist.batch import broadcast_batch, stream_batches
from gpudist.capturing import capture
from gpudist.convert import Plan, compiled, distribute, plan_of, sequential
from gpudist.errors import (
    CheckpointError,
    CollectiveTimeout,
    ConventionError,
    ConversionError,
    GpudistError,
    NotBuiltError,
    PartitionError,
    PeerFailure,
    PlanMismatch,
    RemoteError,
    ShapeError,
    TransportError,
)
from gpudist.geometry import HaloWidths, SlidingWindow, TransposedWindow
from gpudist.nn.attention.all_to_all import all_to_all_attention
from gpudist.nn.attention.ring import ring_attention
from gpudist.nn.scan.affine_scan import affine_scan, carried_state
from gpudist.nn.scan.causal_conv1d import causal_conv1d
from gpudist.nn.tensor_parallel.invariant import invariant_sum
from gpudist.ops import (
    all_gather,
    all_sum_reduce,
    broadcast,
    gather,
    halo_exchange,
    repartition,
    scatter,
    send_recv,
    sum_reduce,
    sum_scatter,
    zero_volume_tensor,
)
from gpudist.profiling import profile, record_ranges, stats
from gpudist.recycling import empty_cache
from gpudist.sbp import GlobalTensor, to_global
from gpudist.sbp.interception import draws_by_index
from gpudist.world.partition import CartesianPartition, Partition
from gpudist.world.runtime import init

if TYPE_CHECKING:
    # Loaded when used.
    from gpudist.pictures import draw

placement = sbp.Placement

__all__ = [
    "CartesianPartition",
    "CheckpointError",
    "CollectiveTimeout",
    "ConventionError",
    "ConversionError",
    "GlobalTensor",
    "GpudistError",
    "HaloWidths",
    "NotBuiltError",
    "Partition",
    "PartitionError",
    "PeerFailure",
    "Plan",
    "PlanMismatch",
    "RemoteError",
    "ShapeError",
    "SlidingWindow",
    "TransportError",
    "TransposedWindow",
    "affine_scan",
    "all_gather",
    "all_sum_reduce",
    "all_to_all_attention",
    "amp",
    "broadcast",
    "broadcast_batch",
    "capture",
    "carried_state",
    "causal_conv1d",
    "compiled",
    "data",
    "distribute",
    "draw",
    "draws_by_index",
    "empty_cache",
    "gather",
    "halo_exchange",
    "init",
    "invariant_sum",
    "nn",
    "ops",
    "placement",
    "plan_of",
    "profile",
    "record_ranges",
    "recycling",
    "repartition",
    "ring_attention",
    "sbp",
    "scatter",
    "send_recv",
    "sequential",
    "stats",
    "stream_batches",
    "sum_reduce",
    "sum_scatter",
    "to_global",
    "zero_volume_tensor",
]
