"""Integer geometry: which ranks own and need which boxes, and the resulting plans.

This package is independent of tensors, processes and transports.
"""

from gpudist.geometry.blocks import Blocks, Decomposition, balanced_block
from gpudist.geometry.boxes import Box, Collective, Message, Move, Plan, Stage
from gpudist.geometry.broadcasting import (
    Pairing,
    plan_all_sum_reduce,
    plan_broadcast,
)
from gpudist.geometry.halo import Halo, plan_halo
from gpudist.geometry.interpolation import InterpolationWindow
from gpudist.geometry.layout import Layout
from gpudist.geometry.parts import PartsWindow
from gpudist.geometry.repartition import plan_all_gather, plan_repartition
from gpudist.geometry.windows import (
    AdaptiveWindow,
    ComposedWindow,
    ExpandedWindow,
    FoldedWindow,
    HaloWidths,
    PaddingWindow,
    PoolWindow,
    Read,
    SlidingWindow,
    TransposedWindow,
    Window,
)

__all__ = [
    "AdaptiveWindow",
    "Blocks",
    "Box",
    "Collective",
    "ComposedWindow",
    "Decomposition",
    "ExpandedWindow",
    "FoldedWindow",
    "Halo",
    "HaloWidths",
    "InterpolationWindow",
    "Layout",
    "Message",
    "Move",
    "PaddingWindow",
    "Pairing",
    "PartsWindow",
    "Plan",
    "PoolWindow",
    "Read",
    "SlidingWindow",
    "Stage",
    "TransposedWindow",
    "Window",
    "balanced_block",
    "plan_all_gather",
    "plan_all_sum_reduce",
    "plan_broadcast",
    "plan_halo",
    "plan_repartition",
]
