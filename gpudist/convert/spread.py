"""Copies of a tensor with one cell in some dims, which one worker has, for the others there."""

from __future__ import annotations

from collections.abc import Collection

import torch

from gpudist.geometry.blocks import Decomposition
from gpudist.nn import Broadcast
from gpudist.nn.partitions import plane
from gpudist.ops.agreement import Layout
from gpudist.partition import CartesianPartition


def spread_along(dims: Collection[int], P: CartesianPartition, layout: Layout) -> Broadcast:
    """The broadcast of a tensor on ``P`` with one cell along ``dims``.

    All workers of ``P`` have agreed on its blocks, empty ones too; so the broadcast, of which some
    have a placeholder alone, need not agree on them again where they are balanced.
    """
    cut = layout.decomposition
    is_balanced = cut == Decomposition.balanced(cut.shape, P.shape)
    P_owner = plane(P, [axis for axis in range(P.dim) if axis not in dims])
    return Broadcast(P_owner, P, global_shape=cut.shape if is_balanced else None)


def spread(broadcast: Broadcast, x: torch.Tensor) -> torch.Tensor:
    """The copy for this worker of ``P_y`` of the broadcast, whose own block is ``x``."""
    # An empty block becomes the placeholder for none.
    return broadcast(x if broadcast.P_x.active or x.dim() < 2 else x.flatten(1))
