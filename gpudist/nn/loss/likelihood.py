"""Elementwise losses of distributions: only the total is communicated."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F

from gpudist.geometry.cartesian import pad_left
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.loss.base import (
    DistributedElementLoss,
    DistributedLoss,
    Reduction,
    no_cells,
    number,
)
from gpudist.world.partition import Partition


@layer(F.kl_div, Sample((6, 5, 4)), Sample((6, 5, 4), "fractions"))
class DistributedKLDivLoss(DistributedElementLoss):
    """Kullback-Leibler divergence of the target from an input of log-probabilities.

    See :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike; for ``"batchmean"``, axes are
            counted from the last dim, and dim 0 is the batch.
        reduction: ``"batchmean"``, the sum divided by the global batch size; ``"mean"`` over all
            cells, ``"sum"`` or ``"none"``.
        log_target: whether the target also consists of log-probabilities.
        P_loss: see the base class.
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
        super().__init__(P_x, cast(Any, reduction), P_loss=P_loss)
        self.log_target = log_target

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.kl_div(input, target, reduction="none", log_target=self.log_target)

    def _weight(self, losses: torch.Tensor) -> torch.Tensor:
        if self.reduction != "batchmean" or self.P_x.index is None:
            return super()._weight(losses)
        if losses.dim() < max(1, self.P_x.dim):
            self._refuse(
                f"the block has {losses.dim()} dims but P_x has {self.P_x.dim} axes; "
                "reduction='batchmean' needs a batch dim and at most one axis per dim"
            )
        index = pad_left(self.P_x.index, losses.dim(), 0)
        return number(0 if any(index[1:]) else losses.shape[0], losses)


@layer(F.poisson_nll_loss, Sample((6, 5, 4)), Sample((6, 5, 4), "positive"))
class DistributedPoissonNLLLoss(DistributedElementLoss):
    """Negative log-likelihood of counts under the Poisson distribution.

    See :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        log_input: whether the input is the logarithm of the expected count.
        full: whether to add Stirling's term, which depends only on the target.
        eps: number added to the input inside the logarithm if ``log_input`` is false.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        P_loss: see the base class.
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


@layer(F.gaussian_nll_loss, Sample((6, 5, 4)), Sample((6, 5, 4)), Sample((6, 5, 4), "positive"))
class DistributedGaussianNLLLoss(DistributedLoss):
    """Negative log-likelihood under Gaussians of given expectations and variances.

    See :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    The loss is called with ``input``, ``target`` and ``var``. The variance is a number, a block of
    the input's shape, or such a block without the last dim or with extent 1 in one dim. In the
    latter cases it is replicated along that dim's axis of ``P_x``, and the gradient of each copy is
    the contribution of its own cells.

    Args:
        P_x: partition of input, target and variance, which are split alike.
        full: whether to add the constant term.
        eps: lower bound to which variances are clamped.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        P_loss: see the base class.

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
        super().__init__(P_x, reduction, P_loss=P_loss)
        self.full = full
        self.eps = eps

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float
    ) -> torch.Tensor:
        if not isinstance(var, torch.Tensor):
            var = torch.full_like(input, var)
        if self.P_x.active:
            self._check_shape("target", target, input.shape)
            var = self._align(var, input.shape)
        else:
            input, target, var = no_cells(input), no_cells(target), no_cells(var)
        self._check_values("_check_variances", var)
        losses = gaussian_losses(input, target, var, self.full, self.eps)
        return self._value(losses, number(losses.numel(), losses), losses.dtype)

    def _align(self, var: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return ``var`` with as many dims as the input."""
        if var.shape == shape[:-1] and var.shape != shape:
            var = var.unsqueeze(-1)
        replicated = [n for n, m in zip(var.shape, shape, strict=False) if n != m]
        if var.dim() != len(shape) or replicated not in ([], [1]):
            self._refuse(
                f"the variance's block has shape {list(var.shape)}; it must be {list(shape)}, the "
                "same with one extent of 1, or the same without the last dim"
            )
        return var

    def _check_variances(self, var: torch.Tensor) -> None:
        if (var < 0).any():
            self._refuse("a variance is negative")


def gaussian_losses(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor, full: bool, eps: float
) -> torch.Tensor:
    """Return the loss of each cell; not a number where the variance is negative."""
    # A variance below eps has the gradient at eps.
    missing = (eps - var).clamp(min=0).masked_fill(var < 0, math.nan)
    var = var + missing.detach()
    losses = 0.5 * (var.log() + (input - target).square() / var)
    return losses + 0.5 * math.log(2 * math.pi) if full else losses
