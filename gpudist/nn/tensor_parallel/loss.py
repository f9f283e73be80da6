"""Vocabulary-parallel cross-entropy: logits stay split over a line of workers."""

from __future__ import annotations

import torch

from gpudist.nn.loss.base import DistributedLoss, Reduction
from gpudist.nn.loss.classes import DistributedCrossEntropyLoss
from gpudist.nn.tensor_parallel.invariant import sum_once
from gpudist.nn.tensor_parallel.region import Convention, TensorRegion
from gpudist.world.partition import Partition


class VocabParallelCrossEntropyLoss(DistributedCrossEntropyLoss):
    """Cross-entropy of logits ``[..., C]`` whose last dim is split over workers in any blocks.

    Every worker has all targets, ``[...]``. With ``"mean"`` or ``"sum"``, the value is the same on
    every worker and counts once, whatever the convention: if all workers call ``backward()``, the
    gradients equal those of the sequential loss. With ``"none"``, all workers hold copies of the
    losses of the tokens.

    Args:
        P: partition of the workers.
        weight, ignore_index, reduction, label_smoothing: as in torch's loss; ``weight`` has the
            global number of classes, on every worker.
        axis: axis of ``P`` along which the classes are split; the other axes hold other samples.
        convention: gradient convention for ``"none"``. ``"invariant"``: the gradients of the
            workers' copies of a loss are the same, and count once; ``"dual"``: they add up.
        P_loss: workers that call the loss and get its value, by default the whole world; must
            contain ``P``.

    Cost:
        A maximum and a sum of two numbers per token along ``axis``, and with a reduction an
        all-reduce of two numbers. No communication in backward with ``"invariant"``, or with a
        reduction if ``P_loss`` has the same workers as ``P``; otherwise another sum of two numbers
        per token.

    Raises:
        ShapeError: on every worker, for an index that is not a class, or a weight whose length is
            not the number of classes.
        PlanMismatch: the blocks of classes change between calls.
        ConventionError: the logits are the whole output of an invariant layer.

    Source:
        Shoeybi et al. 2019, arXiv:1909.08053.
    """

    def __init__(
        self,
        P: Partition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        axis: int = -1,
        convention: Convention = "invariant",
        P_loss: Partition | None = None,
    ) -> None:
        self._region = TensorRegion(self._name, P, axis, convention)
        P_x = self._region.P
        super().__init__(P_x, weight, ignore_index, reduction, label_smoothing, P_loss=P_loss)
        self._is_invariant = self._region.is_invariant
        if reduction != "none":
            # All workers that receive the value hold its losses, so their gradients are equal.
            self._is_invariant = sorted(P_x.ranks) == sorted(self.P_loss.ranks)
            if self._is_invariant:
                self._P_total = P_x.along([0])

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute the loss of logits whose classes are split.

        Args:
            input: logits ``[..., classes of this worker]``.
            target: class indices, ``[...]``.

        Returns:
            Mean or sum, the same on all workers; without a reduction, one loss per index.
        """
        if not self.P_x.active:
            return super().forward(input, target)
        if input.dim() == 0 or target.shape != input.shape[:-1]:
            self._refuse(
                f"the target has shape {list(target.shape)}; for logits of shape "
                f"{list(input.shape)} it must be {list(input.shape[:-1])}"
            )
        logits = input.reshape(target.numel(), input.shape[-1])
        losses = super().forward(logits, target.reshape(-1))
        return losses.view(target.shape) if self.reduction == "none" else losses

    def _sum_over_line(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_invariant and self._line.size > 1 and self._line.active:
            self._expectation(x, self._line)
            return sum_once(x, self._line)
        return super()._sum_over_line(x)

    def _value(
        self, losses: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if self.reduction == "none" or self._is_invariant:
            return DistributedLoss._value(self, losses, weights, dtype)
        return super()._value(losses, weights, dtype)
