"""Losses whose value only rank 0 has, as in DistDL; on other workers they are 0."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.checks.arguments import Checked
from gpudist.compat.distdl.adapter import make
from gpudist.compat.distdl.layers import LAYERS
from gpudist.compat.distdl.partition import MPICartesianPartition
from gpudist.compat.distdl.tensors import ZeroVolumeCorrectorFunction
from gpudist.errors import ShapeError


class _Loss(Checked, torch.nn.Module):
    """Loss of tensors split alike over ``P_x``.

    Rank 0 gets the value, every other worker 0. All of them call ``backward()``, and get the
    gradient of the sequential loss.

    Args:
        P_x: partition of input and target.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for this worker's block of the losses; for
            the KL divergence also ``"batchmean"``.

    Cost:
        One sum-reduce of two numbers; in backward one broadcast.

    Raises:
        ShapeError: ``reduction`` is something else.
    """

    _torch_loss: type[torch.nn.Module]
    _valid_reductions = ("none", "mean", "sum")

    def __init__(self, P_x: MPICartesianPartition, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in self._valid_reductions:
            raise ShapeError(
                f"{type(self).__name__}: reduction is {reduction!r}; it must be one of "
                f"{list(self._valid_reductions)}"
            )
        self.P_x, self.reduction = P_x, reduction
        root = P_x.create_partition_inclusive([0])
        self.P_0 = root.create_cartesian_topology_partition([1] * P_x.dim)
        self._local_loss = self._torch_loss(reduction="none" if reduction == "none" else "sum")
        self._sum = LAYERS["SumReduce"](P_x, self.P_0, preserve_batch=False)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return ZeroVolumeCorrectorFunction.apply(input)
        loss = self._local_loss(input, target)
        if self.reduction == "none":
            return loss
        count = loss.new_tensor(self._count(input), dtype=torch.float64)
        total = self._sum(torch.stack([loss.double(), count]))
        if self.P_0.active:
            total = total[0] / total[1].detach()
        return ZeroVolumeCorrectorFunction.apply(total).to(loss.dtype)

    def _count(self, input: torch.Tensor) -> int:
        # This worker's part of the number by which the sum is divided.
        if self.reduction == "mean":
            return input.numel()
        if self.reduction == "batchmean":
            return 0 if self.P_x.index[1:].any() else input.shape[0]
        return int(self.P_0.active)


_LOSSES = {
    "L1Loss": torch.nn.L1Loss,
    "MSELoss": torch.nn.MSELoss,
    "PoissonNLLLoss": torch.nn.PoissonNLLLoss,
    "BCELoss": torch.nn.BCELoss,
    "BCEWithLogitsLoss": torch.nn.BCEWithLogitsLoss,
}
LOSSES: dict[str, Any] = {
    f"Distributed{name}": make(f"Distributed{name}", _Loss, _torch_loss=loss)
    for name, loss in _LOSSES.items()
}
"""Classes by DistDL's names."""
LOSSES["DistributedKLDivLoss"] = make(
    "DistributedKLDivLoss",
    _Loss,
    _torch_loss=torch.nn.KLDivLoss,
    _valid_reductions=(*_Loss._valid_reductions, "batchmean"),
)
