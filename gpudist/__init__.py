"""gpudist: model parallelism for PyTorch, by data movements with exact adjoints."""

from gpudist import nn, ops, recycling
from gpudist.convert import Plan, distribute, plan_of, sequential
from gpudist.errors import (
    CheckpointError,
    CollectiveTimeout,
    ConversionError,
    GpudistError,
    NotBuiltError,
    PartitionError,
    PeerFailure,
    PlanMismatch,
    ShapeError,
    TransportError,
)
from gpudist.geometry import HaloWidths, SlidingWindow, TransposedWindow
from gpudist.nn.attention_all_to_all import all_to_all_attention
from gpudist.nn.attention_ring import ring_attention
from gpudist.nn.invariant import invariant_sum
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
from gpudist.partition import CartesianPartition, Partition
from gpudist.recycling import empty_cache
from gpudist.runtime import init

__version__ = "0.1.0"

__all__ = [
    "CartesianPartition",
    "CheckpointError",
    "CollectiveTimeout",
    "ConversionError",
    "GpudistError",
    "HaloWidths",
    "NotBuiltError",
    "Partition",
    "PartitionError",
    "PeerFailure",
    "Plan",
    "PlanMismatch",
    "ShapeError",
    "SlidingWindow",
    "TransportError",
    "TransposedWindow",
    "all_gather",
    "all_sum_reduce",
    "all_to_all_attention",
    "broadcast",
    "distribute",
    "empty_cache",
    "gather",
    "halo_exchange",
    "init",
    "invariant_sum",
    "nn",
    "ops",
    "plan_of",
    "recycling",
    "repartition",
    "ring_attention",
    "scatter",
    "send_recv",
    "sequential",
    "sum_reduce",
    "sum_scatter",
    "zero_volume_tensor",
]
