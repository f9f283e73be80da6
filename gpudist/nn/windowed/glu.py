"""Distributed GLU: one half of a dim, gated by the other one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.windows import HaloWidths, PaddingWindow
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import require_axis
from gpudist.ops.bound import Bound
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.shape_agreement import ShapeAgreement
from gpudist.world.partition import CartesianPartition


@layer(F.glu, Sample((2, 3, 4, 10)))
class DistributedGLU(DistributedModule):
    """Compute ``a * sigmoid(b)`` for the halves ``a`` and ``b`` of ``dim``, which may be split.

    Args:
        P_x: partition of input and output, one axis per dim; output blocks are balanced in ``dim``.
        dim: as in the torch layer.

    Cost:
        Where ``dim`` is split, each cell is sent at most once, in messages along it; backward moves
        the same bytes. Otherwise no communication, and torch's own kernel.

    Raises:
        PartitionError: ``dim`` is not an axis of ``P_x``.
        ShapeError: on every rank alike, if ``dim`` has an odd extent.
    """

    def __init__(self, P_x: CartesianPartition, dim: int = -1) -> None:
        super().__init__()
        require_axis("DistributedGLU", P_x, dim)
        self.P_x, self.dim, self._P_line = P_x, dim, P_x.along([dim])
        remedy = "create a layer for each extent of a split dim"
        self._agreement = ShapeAgreement(
            "DistributedGLU", self._P_line, self._P_line, P_x.dim, remedy=remedy
        )
        self._crops = Bound[list[Movement]]("static")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return input.clone()
        crops = self._crops(input, self._bind)
        halves = torch.cat(move(crops, (input, input)), self.dim) if crops else input
        return F.glu(halves, self.dim)

    def _bind(self, x: torch.Tensor) -> list[Movement]:
        inputs, line, dim = self._agreement(x).decomposition, self._P_line, self.dim % self.P_x.dim
        half, rest = divmod(inputs.shape[dim], 2)
        if rest:
            raise ShapeError(
                f"DistributedGLU, dim {dim}: the global extent {inputs.shape[dim]} has no halves; "
                "pad or crop the input to an even one"
            )
        movements: list[Movement] = []
        for crop in (PaddingWindow(0, -half), PaddingWindow(-half, 0)) if line.size > 1 else ():
            windows = [crop if d == dim else HaloWidths() for d in range(line.dim)]
            movements.append(HaloExchange(line, windows).bind_to(inputs, x.dtype, x))
        return movements
