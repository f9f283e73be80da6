"""Losses of distributions, cell by cell: nothing moves but the total."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from gpudist.geometry.cartesian import left_padded
from gpudist.nn.loss.base import (
    DistributedElementLoss,
    DistributedLoss,
    Reduction,
    no_cells,
    number,
    number_of_cells,
)
from gpudist.world.partition import Partition


class DistributedKLDivLoss(DistributedElementLoss):
    """Kullback-Leibler divergence of the target from an input of log-probabilities, term by term;
    see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: owns input and target, cut alike; for ``"batchmean"``, axes are counted from the last
            dim, and dim 0 is the batch.
        reduction: ``"batchmean"``, the sum over the global batch size; ``"mean"`` over all cells,
            ``"sum"`` or ``"none"``.
        log_target: the target is of log-probabilities too.
        P_loss: as in the base class.
    """

    reductions: ClassVar[tuple[str, ...]] = ("mean", "batchmean", "sum", "none")

    def __init__(
        self,
        P_x: Partition,
        reduction: Literal["mean", "batchmean", "sum", "none"] = "mean",
        log_target: bool = False,
        *,
        P_loss: Partition | None = None,
    ) -> None:
        DistributedLoss.__init__(self, P_x, reduction, P_loss)
        self.log_target = log_target

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.kl_div(input, target, reduction="none", log_target=self.log_target)

    def _weight(self, losses: torch.Tensor) -> torch.Tensor:
        if self.reduction != "batchmean" or self.P_x.index is None:
            return super()._weight(losses)
        if losses.dim() < max(1, self.P_x.dim):
            self._refuse(
                f"the block has {losses.dim()} dims, and P_x {self.P_x.dim} axes: "
                "reduction='batchmean' needs to know which dim is the batch"
            )
        index = left_padded(self.P_x.index, losses.dim(), 0)
        return number(0 if any(index[1:]) else losses.shape[0], losses)


class DistributedPoissonNLLLoss(DistributedElementLoss):
    """Negative log-likelihood of counts under Poisson's distribution; see
    :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: owns input and target, cut alike.
        log_input: the input is the logarithm of the expected count.
        full: add Stirling's term, which depends on the target alone.
        eps: keeps the logarithm of an input of 0 finite, where ``log_input`` is false.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        P_loss: as in the base class.
    """

    def __init__(
        self,
        P_x: Partition,
        log_input: bool = True,
        full: bool = False,
        eps: float = 1e-8,
        reduction: Reduction = "mean",
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss=P_loss)
        self.log_input = log_input
        self.full = full
        self.eps = eps

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.poisson_nll_loss(
            input, target, self.log_input, self.full, eps=self.eps, reduction="none"
        )


class DistributedGaussianNLLLoss(DistributedLoss):
    """Negative log-likelihood under Gaussians of given expectations and variances; see
    :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Called with ``input``, ``target`` and ``var``: a number, or a block like the input's, or one
    that lacks the last dim or has extent 1 in one. Such a variance is replicated along that dim's
    axis of ``P_x``: the gradient of each copy is what its own cells contribute, as for everything
    replicated.

    Args:
        P_x: owns input, target and variance, cut alike.
        full: add the constant term.
        eps: variances below are taken as this.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        P_loss: as in the base class.

    Raises:
        ShapeError: on every worker, for a negative variance.
    """

    def __init__(
        self,
        P_x: Partition,
        *,
        full: bool = False,
        eps: float = 1e-6,
        reduction: Reduction = "mean",
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss)
        self.full = full
        self.eps = eps

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float
    ) -> torch.Tensor:
        if not isinstance(var, torch.Tensor):
            var = torch.full_like(input, var)
        if self.P_x.active:
            self._check_shape("target", target, input.shape)
            var = self._aligned(var, input.shape)
        else:
            input, target, var = no_cells(input), no_cells(target), no_cells(var)
        self._check_values("_check_variances", var)
        losses = self._losses(input, target, var)
        return self._value(losses, number_of_cells(losses), losses.dtype)

    def _losses(self, input: torch.Tensor, target: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        # Where a variance is too small, its gradient is taken at eps all the same.
        missing = (self.eps - var).clamp(min=0).masked_fill(var < 0, math.nan)
        var = var + missing.detach()
        losses = 0.5 * (var.log() + (input - target).square() / var)
        return losses + 0.5 * math.log(2 * math.pi) if self.full else losses

    def _aligned(self, var: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """``var`` with the input's dims."""
        if var.shape == shape[:-1] and var.shape != shape:
            var = var.unsqueeze(-1)
        replicated = [n for n, m in zip(var.shape, shape, strict=False) if n != m]
        if var.dim() != len(shape) or replicated not in ([], [1]):
            self._refuse(
                f"the variance's block has shape {list(var.shape)}, not {list(shape)}, or the same "
                "with 1 for one extent, or without the last"
            )
        return var

    def _check_variances(self, var: torch.Tensor) -> None:
        if (var < 0).any():
            self._refuse("a variance is negative")
