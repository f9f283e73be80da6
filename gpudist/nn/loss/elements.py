"""Elementwise losses of differences: only the total is communicated."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.loss.base import DistributedElementLoss, Reduction
from gpudist.world.partition import Partition


@layer(F.mse_loss, Sample((6, 5, 4)), Sample((6, 5, 4)))
class DistributedMSELoss(DistributedElementLoss):
    """Mean of ``(input - target)^2``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as in torch's loss.
        P_loss: workers that call the loss and get its value, by default the whole world.
    """

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(input, target, reduction="none")


@layer(F.l1_loss, Sample((6, 5, 4)), Sample((6, 5, 4)))
class DistributedL1Loss(DistributedElementLoss):
    """Mean of ``|input - target|``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as in torch's loss.
        P_loss: workers that call the loss and get its value, by default the whole world.
    """

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(input, target, reduction="none")


@layer(F.smooth_l1_loss, Sample((6, 5, 4)), Sample((6, 5, 4)))
class DistributedSmoothL1Loss(DistributedElementLoss):
    """Mean of a loss that is quadratic in small differences and linear in large ones.

    With ``d = |input - target|``, the loss of a cell is ``d^2 / (2 * beta)`` where ``d`` is below
    ``beta``, else ``d - beta / 2``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as in torch's loss.
        beta: difference at which the parts meet, at least 0.
        P_loss: workers that call the loss and get its value, by default the whole world.
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


@layer(F.huber_loss, Sample((6, 5, 4)), Sample((6, 5, 4)))
class DistributedHuberLoss(DistributedElementLoss):
    """Mean of a loss that is quadratic in small differences and linear in large ones.

    With ``d = |input - target|``, the loss of a cell is ``d^2 / 2`` where ``d`` is below ``delta``,
    else ``delta * (d - delta / 2)``; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as in torch's loss.
        delta: difference at which the parts meet, above 0.
        P_loss: workers that call the loss and get its value, by default the whole world.
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
