"""Vocabulary-parallel cross-entropy: logits cut over a line of workers, and never gathered."""

from __future__ import annotations

import torch

from gpudist.nn.loss.base import DistributedLoss, Reduction
from gpudist.nn.loss.classes import DistributedCrossEntropyLoss
from gpudist.nn.tensor_parallel.invariant import sum_once
from gpudist.nn.tensor_parallel.region import Convention, TensorRegion
from gpudist.world.partition import Partition


class VocabParallelCrossEntropyLoss(DistributedCrossEntropyLoss):
    """Cross-entropy of logits ``[..., C]``, the last dim cut over workers in blocks of any size.

    Every worker has all targets, ``[...]``. A value, ``"mean"`` or ``"sum"``, is the same on every
    worker and counts once, whatever the convention: ``backward()`` on all of them gives the
    sequential gradient. Losses of tokens, ``"none"``, are copies of each other on all workers.

    Args:
        P: the workers.
        weight, ignore_index, reduction, label_smoothing: as torch's loss; ``weight`` has the global
            number of classes, on every worker.
        axis: of ``P``, along which the classes are cut; the others hold other samples.
        convention: for ``"none"``. ``"invariant"``: the gradients that the workers give to their
            copies of a loss are the same, and taken once; ``"dual"``: they add up.
        P_loss: the workers that call the loss and get its value, the whole world unless given;
            contains ``P``.

    Cost:
        A maximum and a sum of two numbers per token along ``axis``, and for a value an all-reduce
        of two numbers. Backward none for a value, where ``P_loss`` has the workers of ``P`` alone,
        and with ``"invariant"``; else another sum of two numbers per token.

    Raises:
        ShapeError: on every worker, for an index that is no class, or a weight that is not of the
            classes.
        PlanMismatch: the blocks of classes change.
        ConventionError: the logits are whole, of an invariant layer.

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
            # All who get the value know the losses of their tokens: their gradients are one.
            self._is_invariant = sorted(P_x.ranks) == sorted(self.P_loss.ranks)
            if self._is_invariant:
                self._P_total = P_x.along([0])

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of this worker's block of the logits.

        Args:
            input: ``[..., classes of this worker]``.
            target: indices of classes, ``[...]``.
        """
        if not self.P_x.active:
            return super().forward(input, target)
        if input.dim() == 0 or target.shape != input.shape[:-1]:
            self._refuse(
                f"the target has shape {list(target.shape)}, not that of the tokens of logits of "
                f"shape {list(input.shape)}"
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
