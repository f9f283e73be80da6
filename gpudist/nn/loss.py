"""Distributed losses: the same scalar on every worker, with the sequential gradient."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from gpudist.autograd import all_reduce_constant
from gpudist.errors import PartitionError, ShapeError
from gpudist.library import handles_of
from gpudist.nn.invariant import invariant_sum
from gpudist.ops.agreement import Agreement
from gpudist.ops.all_sum_reduce import AllSumReduce
from gpudist.ops.operator import Bound
from gpudist.partition import CartesianPartition, Partition

Reduction = Literal["mean", "sum", "none"]


class _DistributedLoss(torch.nn.Module):
    """A loss over blocks on ``P_x``.

    Args:
        P_x: owns the input.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for this worker's block of the losses.
        P_loss: the workers that call the loss and get its value, the whole world unless given;
            contains ``P_x``.
    """

    def __init__(self, P_x: Partition, reduction: Reduction, P_loss: Partition | None) -> None:
        super().__init__()
        name = type(self).__name__
        if reduction not in ("mean", "sum", "none"):
            raise ShapeError(f"{name}: reduction is {reduction!r}; use 'mean', 'sum' or 'none'")
        self.P_x = P_x
        self.P_loss = P_loss if P_loss is not None else P_x.world
        outside = sorted(set(P_x.ranks) - set(self.P_loss.ranks))
        if outside:
            raise PartitionError(f"{name}: world ranks {outside} of P_x are not in P_loss")
        self.reduction: Reduction = reduction

    def _total(self, losses: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The value on all workers, from this worker's losses and what they weigh in the mean."""
        # Half precision counts to 2048, or 256.
        wide = torch.promote_types(losses.dtype, torch.float32)
        parts = torch.stack([losses.sum(dtype=wide), weight.sum(dtype=wide)])
        total = invariant_sum(parts, self.P_loss)
        value = total[0] / total[1].detach() if self.reduction == "mean" else total[0]
        return value.to(losses.dtype)

    @staticmethod
    def _no_losses(placeholder: torch.Tensor) -> torch.Tensor:
        """Those of a worker without a block: an empty sum, as nonlinear as the others' parts."""
        return placeholder.reshape(-1)[:0].square()

    def _check_target(self, expected: torch.Size, target: torch.Tensor) -> None:
        if target.shape != expected:
            raise ShapeError(
                f"{type(self).__name__}: the target's block has shape {list(target.shape)}, not "
                f"{list(expected)}"
            )

    def extra_repr(self) -> str:
        return f"P_x={list(self.P_x.shape)}, reduction={self.reduction!r}"


class _DistributedElementLoss(_DistributedLoss):
    def __init__(
        self, P_x: Partition, reduction: Reduction = "mean", *, P_loss: Partition | None = None
    ) -> None:
        super().__init__(P_x, reduction, P_loss)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            losses = self._no_losses(input)
        else:
            self._check_target(input.shape, target)
            losses = self._losses(input, target)
        if self.reduction == "none":
            return losses
        return self._total(losses, torch.tensor(losses.numel(), device=losses.device))

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class DistributedMSELoss(_DistributedElementLoss):
    """Mean of ``(input - target)^2`` over a tensor cut over ``P_x`` in any dims.

    Every worker of ``P_loss`` calls it and gets the same value; calling ``backward()`` on all of
    them gives the sequential gradient. Workers outside ``P_x`` pass their zero-volume placeholder
    as input.

    Args:
        P_x: owns input and target, cut alike.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for this worker's block of the losses.
        P_loss: the workers that call the loss and get its value, the whole world unless given.

    Cost:
        One all-reduce of two numbers; backward none.

    Raises:
        ShapeError: the target's block does not have the input's shape.
    """

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(input, target, reduction="none")


class DistributedL1Loss(_DistributedElementLoss):
    """Mean of ``|input - target|`` over a tensor cut over ``P_x`` in any dims.

    Every worker of ``P_loss`` calls it and gets the same value; calling ``backward()`` on all of
    them gives the sequential gradient. Workers outside ``P_x`` pass their zero-volume placeholder
    as input.

    Args:
        P_x: owns input and target, cut alike.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for this worker's block of the losses.
        P_loss: the workers that call the loss and get its value, the whole world unless given.

    Cost:
        One all-reduce of two numbers; backward none.

    Raises:
        ShapeError: the target's block does not have the input's shape.
    """

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.l1_loss(input, target, reduction="none")


class DistributedCrossEntropyLoss(_DistributedLoss):
    """Cross-entropy of logits ``[B, C, *spatial]`` cut over ``P_x`` in any dims, the classes
    included.

    Every worker of ``P_loss`` calls it and gets the same value; calling ``backward()`` on all of
    them gives the sequential gradient. Workers outside ``P_x`` pass their zero-volume placeholder
    as input. Targets
    are class indices, global numbers: each worker passes those of its block of batch and features,
    the same along the class axis.

    Args:
        P_x: owns the logits, one axis per dim; axis 1 splits the classes in balanced blocks.
        weight: of each class, ``[C]`` with the global number of classes, on every worker.
        ignore_index: targets of this value count for nothing.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for this worker's losses ``[B, *spatial]``,
            on workers at class index 0; empty elsewhere, so that every sample counts once.
        label_smoothing: not supported.
        P_loss: the workers that call the loss and get its value, the whole world unless given.

    Cost:
        Where classes are split, a maximum and a sum of two numbers per sample along the class axis;
        always one all-reduce of two numbers. Backward: one sum along the class axis.

    Raises:
        ShapeError: the target's block does not fit the logits'.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss)
        if label_smoothing:
            raise ShapeError(f"{type(self).__name__}: label_smoothing is not supported")
        if P_x.dim < 2:
            raise PartitionError(
                f"{type(self).__name__}: P_x has shape {list(P_x.shape)} but needs an axis for "
                "the batch and one for the classes"
            )
        self.ignore_index = ignore_index
        self.register_buffer("weight", weight)
        self.weight: torch.Tensor | None
        # Samples are independent: only workers that hold classes of the same ones need to agree.
        self._classes = P_x.along([1])
        self._agreement = Agreement(type(self).__name__, self._classes, self._classes, P_x.dim)
        self._bound = Bound[tuple[int, int, int]]("static", self._agreement)
        self._sum_over_classes = AllSumReduce(self._classes, [1])

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        index = self.P_x.index
        if index is None:
            losses = self._no_losses(input)
            weights = losses.detach()
        else:
            classes, first, last = self._bound(input, self._agree_on_classes)
            self._check_target(input.shape[:1] + input.shape[2:], target)
            if is_dynamo_compiling():
                (loss,) = handles_of(self)
                torch.ops.gpudist.check(loss, target, "_check_classes", [classes], None)
            else:
                self._check_classes(target, classes)
            losses, weights = self._losses(input, target, first, last)
            if index[1] > 0:
                # All workers along the class axis know every loss of their samples: one of them
                # counts it.
                losses, weights = losses.reshape(-1)[:0], weights.reshape(-1)[:0]
        return losses if self.reduction == "none" else self._total(losses, weights)

    def _agree_on_classes(self, input: torch.Tensor) -> tuple[int, int, int]:
        """The global number of classes, and the range of this worker's."""
        assert self.P_x.index is not None
        classes = self._agreement(input).decomposition.dims[1]
        return classes.extent, *classes.block(self.P_x.index[1])

    def _check_classes(self, target: torch.Tensor, classes: int) -> None:
        """Refuse targets that are no class. On a GPU that would wait for the host: not checked."""
        if target.device.type != "cpu":
            return
        wrong = target[((target < 0) | (target >= classes)) & (target != self.ignore_index)]
        if wrong.numel():
            self._agreement.refuse(
                ShapeError(
                    f"DistributedCrossEntropyLoss: target {wrong[0].item()} is none of the "
                    f"classes 0 to {classes - 1}"
                )
            )

    def _losses(
        self, logits: torch.Tensor, target: torch.Tensor, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the weight of every sample, on all workers of the class axis."""
        largest = self._largest(logits.detach())
        here = (target >= first) & (target < last)
        exponentials = (logits - largest.unsqueeze(1)).exp().sum(1)
        if first < last:
            local = (target - first).clamp(0, last - first - 1)
            picked = logits.gather(1, local.unsqueeze(1)).squeeze(1)
            picked = torch.where(here, picked, torch.zeros_like(picked))
        else:
            picked = logits.sum(1)
        sums = self._sum_over_classes(torch.stack([exponentials, picked], dim=1))
        losses = sums[:, 0].log() + largest - sums[:, 1]
        counts = target != self.ignore_index
        weights = counts.to(logits.dtype)
        if self.weight is not None:
            weights = weights * self.weight.to(logits.dtype)[target.clamp(min=0) * counts]
        return torch.where(counts, losses * weights, torch.zeros_like(losses)), weights

    def _largest(self, logits: torch.Tensor) -> torch.Tensor:
        """The largest logit of each sample over all classes, so that exponentials stay finite."""
        if logits.shape[1]:
            largest = logits.amax(1)
        else:
            shape = logits.shape[:1] + logits.shape[2:]
            largest = torch.full(shape, -torch.inf, dtype=logits.dtype, device=logits.device)
        if self._classes.size == 1:
            return largest
        return all_reduce_constant(largest, self._classes, "max")
