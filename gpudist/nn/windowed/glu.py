"""Distributed GLU: one half of a dim, gated by the other one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import concatenate, move
from gpudist.geometry.windows import HaloWidths, PaddingWindow
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import require_axis
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.world.partition import CartesianPartition


@layer(F.glu, Sample((2, 3, 4, 10)))
class DistributedGLU(DistributedModule):
    """Compute ``a * sigmoid(b)`` for the halves ``a`` and ``b`` of ``dim``, which may be split.

    Args:
        P_x: partition of input and output, one axis per dim; output blocks are balanced in ``dim``.
        dim: as in the torch layer.

    Cost:
        Each cell is sent at most once, and only where ``dim`` is split; backward sends as many.

    Raises:
        PartitionError, ShapeError: ``dim`` is not an axis of ``P_x``, or its extent is odd.
    """

    def __init__(self, P_x: CartesianPartition, dim: int = -1) -> None:
        super().__init__()
        require_axis("DistributedGLU", P_x, dim)
        self.P_x, self.dim, line = P_x, dim, P_x.along([dim])
        remedy = "create a layer for each extent of a split dim"
        self._agree_on(line, P_x.dim, remedy=remedy)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return input.clone()
        crops: list[Movement] = self._bindings(input, self._agree_and_bind)
        halves = concatenate(move(crops, (input, input)), self.dim) if crops else input
        return F.glu(halves, self.dim)

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> list[Movement]:
        inputs, line = layout.decomposition, self.P_x.along([self.dim])
        dim, extent = self.dim % line.dim, inputs.shape[self.dim]
        if extent % 2:
            raise ShapeError(
                f"DistributedGLU, dim {dim}: the global extent {extent} is odd; pad or crop it"
            )
        crops = PaddingWindow(0, -(extent // 2)), PaddingWindow(-(extent // 2), 0)
        behind = [HaloWidths()] * (line.dim - dim - 1)
        exchanges = [HaloExchange(line, [crop, *behind]) for crop in crops if line.size > 1]
        return [exchange.bind_to(inputs, x.dtype, x) for exchange in exchanges]
