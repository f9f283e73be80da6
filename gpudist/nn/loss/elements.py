"""Losses of differences, cell by cell: nothing moves but the total."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn.loss.base import DistributedElementLoss, Reduction
from gpudist.world.partition import Partition


class DistributedMSELoss(DistributedElementLoss):
    """Mean of ``(input - target)^2``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`."""

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(input, target, reduction="none")


class DistributedL1Loss(DistributedElementLoss):
    """Mean of ``|input - target|``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`."""

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(input, target, reduction="none")


class DistributedSmoothL1Loss(DistributedElementLoss):
    """Half the square over ``beta`` of a difference below ``beta``, else its absolute value less
    ``beta / 2``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: owns input and target, cut alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        beta: where the parts meet, at least 0.
        P_loss: as in the base class.
    """

    def __init__(
        self,
        P_x: Partition,
        reduction: Reduction = "mean",
        beta: float = 1.0,
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss=P_loss)
        if not beta >= 0:
            raise ShapeError(f"{self._name}: beta is {beta}; it must be at least 0")
        self.beta = beta

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(input, target, reduction="none", beta=self.beta)


class DistributedHuberLoss(DistributedElementLoss):
    """Half the square of a difference below ``delta``, else ``delta`` times its absolute value less
    ``delta / 2``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: owns input and target, cut alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        delta: where the parts meet, above 0.
        P_loss: as in the base class.
    """

    def __init__(
        self,
        P_x: Partition,
        reduction: Reduction = "mean",
        delta: float = 1.0,
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss=P_loss)
        if not delta > 0:
            raise ShapeError(f"{self._name}: delta is {delta}; it must be above 0")
        self.delta = delta

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(input, target, reduction="none", delta=self.delta)
