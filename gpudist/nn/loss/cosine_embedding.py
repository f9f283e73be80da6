"""Cosine loss of pairs of vectors, which may be split: it sums three numbers per pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.loss.base import DistributedSampleLoss, Reduction, no_cells
from gpudist.nn.partitions import require_axes
from gpudist.world.partition import CartesianPartition, Partition

# Keeps the cosine of a zero vector finite; torch's 1e-12, rounded to float32.
_EPSILON = 9.999999960041972e-13


@layer(F.cosine_embedding_loss, Sample((6, 5)), Sample((6, 5)), Sample((6,), "signs"))
class DistributedCosineEmbeddingLoss(DistributedSampleLoss):
    """Cosine loss of the rows of two inputs ``[B, D]``.

    The mean of ``1 - cos`` for targets of 1, and of ``max(0, cos - margin)`` for targets of -1; see
    :class:`~gpudist.nn.loss.base.DistributedSampleLoss`.

    Args:
        P_x: partition of both inputs ``[B, D]``, which are split alike; each worker passes the
            targets ``[B]`` of its rows, the same along axis 1.
        margin: cosine up to which a negative target has no loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        P_loss: see the base class.

    Cost:
        Where rows are split, a sum of three numbers per row along axis 1, in forward and in
        backward; and the all-reduce of the base class.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        margin: float = 0.0,
        reduction: Reduction = "mean",
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss)
        require_axes(self._name, P_x, P_x.dim == 2, "two axes, one per dim of the inputs")
        self.margin = margin

    def forward(
        self, input1: torch.Tensor, input2: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        if self.P_x.active:
            if input1.dim() != 2:
                self._refuse(f"the first input's block has {input1.dim()} dims, not 2")
            self._check_shape("second input", input2, input1.shape)
            self._check_shape("target", target, input1.shape[:1])
        else:
            input1, input2 = no_cells(input1).reshape(0, 1), no_cells(input2).reshape(0, 1)
            target = no_cells(target)
        dtype = torch.promote_types(input1.dtype, input2.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        losses = self._losses(input1.to(wide), input2.to(wide), target)
        return self._value(losses, torch.ones_like(losses), dtype)

    def _losses(
        self, input1: torch.Tensor, input2: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        sums = self._sum_over_line(sums_of_rows(input1, input2))
        return losses_of_rows(sums, target, self.margin)


def sums_of_rows(input1: torch.Tensor, input2: torch.Tensor) -> torch.Tensor:
    """Return three sums along the last dim, from which the cosine of each pair follows."""
    products = (input1 * input2, input1.square(), input2.square())
    return torch.stack([each.sum(-1) for each in products], dim=-1)


def losses_of_rows(sums: torch.Tensor, target: torch.Tensor, margin: float) -> torch.Tensor:
    """Return the loss of each pair from the sums over all its cells."""
    product, first, second = sums.unbind(-1)
    cosine = product / ((first + _EPSILON) * (second + _EPSILON)).sqrt()
    none = torch.zeros_like(cosine)
    positive = torch.where(target == 1, 1 - cosine, none)
    return positive + torch.where(target == -1, (cosine - margin).clamp(min=0), none)
