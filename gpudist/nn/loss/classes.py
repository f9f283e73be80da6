"""Losses of classes, which may be split: sums over the classes are of a few numbers a sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpudist.errors import ShapeError
from gpudist.exchange.autograd import all_reduce_constant
from gpudist.nn.autocast import loss_dtype
from gpudist.nn.loss.base import DistributedSampleLoss, Reduction, at_least_float32, no_cells
from gpudist.nn.parameters.placement import Placement
from gpudist.ops.agreement import Agreement
from gpudist.ops.bound import Bound
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class _Classes:
    """How many there are in all, and the range of this worker's."""

    extent: int
    first: int
    last: int


class _ClassLoss(DistributedSampleLoss):
    def __init__(
        self,
        P_x: CartesianPartition,
        weight: torch.Tensor | None,
        ignore_index: int,
        reduction: Reduction,
        P_loss: Partition | None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss)
        if weight is not None and weight.dim() != 1:
            raise ShapeError(
                f"{self._name}: the weight has shape {list(weight.shape)}; it must be [C], with "
                "the global number of classes"
            )
        self.ignore_index = ignore_index
        self.register_buffer("weight", weight)
        self.weight: torch.Tensor | None
        self._agreement = Agreement(self._name, self._line, self._line, P_x.dim)
        self._bound = Bound[_Classes]("static", self._agreement)

    def _placements(self) -> dict[str, Placement]:
        if self.weight is None:
            return {}
        return {"weight": Placement.everywhere(self.weight.shape, self.P_loss)}

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.P_x.active:
            classes = self._bound(input, self._agree_on_classes)
            self._check_target(input, target, classes)
        else:
            # As others compute, but of no samples of one class.
            classes = _Classes(1, 0, 1)
            input = no_cells(input).reshape(0, 1)
            target = no_cells(target)
            target = target.reshape(0, 1) if target.is_floating_point() else target
        losses, weights = self._losses(input, target, classes)
        return self._value(losses, weights, self._dtype(input, target))

    def _agree_on_classes(self, input: torch.Tensor) -> _Classes:
        assert self.P_x.index is not None
        classes = self._agreement(input).decomposition.dims[1]
        if self.weight is not None and len(self.weight) != classes.extent:
            self._refuse(f"{len(self.weight)} weights for {classes.extent} classes")
        return _Classes(classes.extent, *classes.block(self.P_x.index[1]))

    def _check_target(self, input: torch.Tensor, target: torch.Tensor, classes: _Classes) -> None:
        """Refuse what are no indices of classes, one for each sample."""
        self._check_shape("target", target, input.shape[:1] + input.shape[2:])
        if target.dtype not in (torch.int64, torch.uint8):
            self._refuse(f"the target is of {target.dtype}; indices are of int64 or uint8")
        self._check_values("_check_classes", target, classes.extent)

    def _check_classes(self, target: torch.Tensor, classes: int) -> None:
        wrong = target[self._is_none(target.long(), classes)]
        if wrong.numel():
            self._refuse(f"target {wrong[0].item()} is none of the classes 0 to {classes - 1}")

    def _is_none(self, target: torch.Tensor, classes: int) -> torch.Tensor:
        return ((target < 0) | (target >= classes)) & (target != self.ignore_index)

    def _dtype(self, input: torch.Tensor, target: torch.Tensor) -> torch.dtype:
        """Of the loss."""
        return loss_dtype(input)

    def _losses(
        self, input: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the weight of every sample, on all workers of the class axis."""
        raise NotImplementedError

    def _weights(self, target: torch.Tensor, classes: _Classes, dtype: torch.dtype) -> torch.Tensor:
        """Those of the samples; 0 of an ignored one, and not a number of one without a class."""
        counts = target != self.ignore_index
        weights = counts.to(dtype)
        if self.weight is not None and classes.extent:
            index = (target * counts).clamp(0, classes.extent - 1)
            weights = weights * self.weight.to(dtype)[index]
        return weights.masked_fill(self._is_none(target, classes.extent), torch.nan)

    def _unless_ignored(self, losses: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.where(target != self.ignore_index, losses, torch.zeros_like(losses))

    def _of_target(self, x: torch.Tensor, target: torch.Tensor, classes: _Classes) -> torch.Tensor:
        """What ``x`` is for each sample's class, on the worker that holds it; 0 elsewhere."""
        first, last = classes.first, classes.last
        if first == last:
            return x.sum(1)
        here = (target >= first) & (target < last)
        local = (target - first).clamp(0, last - first - 1)
        picked = x.gather(1, local.unsqueeze(1)).squeeze(1)
        return torch.where(here, picked, torch.zeros_like(picked))


class DistributedNLLLoss(_ClassLoss):
    """Negative log-likelihood of an input ``[B, C, *spatial]`` of log-probabilities, cut over
    ``P_x`` in any dims, the classes included; see
    :class:`~gpudist.nn.loss.base.DistributedSampleLoss`.

    Args and errors are those of :class:`DistributedCrossEntropyLoss`, but targets are indices.

    Cost:
        Where classes are split, a sum of one number per sample along the class axis, forward and
        backward; the base class's all-reduce.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, weight, ignore_index, reduction, P_loss)

    def _losses(
        self, input: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target, wide = target.long(), at_least_float32(input.dtype)
        picked = self._sum_over_line(self._of_target(input, target, classes).to(wide))
        weights = self._weights(target, classes, wide)
        return self._unless_ignored(-picked * weights, target), weights


class DistributedCrossEntropyLoss(_ClassLoss):
    """Cross-entropy of logits ``[B, C, *spatial]`` cut over ``P_x`` in any dims, the classes
    included; see :class:`~gpudist.nn.loss.base.DistributedSampleLoss`.

    Targets are indices of classes, global numbers: each worker passes those of its block of batch
    and spatial dims, ``[B, *spatial]``, the same along the class axis. Or they are probabilities of
    classes, a block like that of the logits.

    Args:
        P_x: owns the logits, one axis per dim; axis 1 splits the classes.
        weight: of each class, ``[C]`` with the global number of classes, on every worker.
        ignore_index: indices of this value count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: share of the target, 0 to 1, that is spread over all classes alike.
        P_loss: as in the base class.

    Cost:
        Where classes are split, a maximum and a sum of two numbers per sample along the class axis,
        of three for probabilities; backward one such sum. The base class's all-reduce. Logits of
        16 bits are copied to float32.

    Raises:
        ShapeError: on every worker, for an index that is no class, or a weight that is not of the
            classes.
        PlanMismatch: the blocks of classes change.
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
        super().__init__(P_x, weight, ignore_index, reduction, P_loss)
        if not 0 <= label_smoothing <= 1:
            raise ShapeError(
                f"{self._name}: label_smoothing is {label_smoothing}; it must be between 0 and 1"
            )
        self.label_smoothing = label_smoothing

    def _check_target(self, input: torch.Tensor, target: torch.Tensor, classes: _Classes) -> None:
        if target.dim() != input.dim():
            super()._check_target(input, target, classes)
            return
        self._check_shape("target", target, input.shape)
        if not target.is_floating_point():
            self._refuse(f"the target is of {target.dtype}; probabilities are floating point")
        if self.ignore_index >= 0:
            self._refuse(f"ignore_index={self.ignore_index}, but the targets are probabilities")

    def _dtype(self, input: torch.Tensor, target: torch.Tensor) -> torch.dtype:
        dtype = loss_dtype(input)
        if target.is_floating_point():
            dtype = torch.promote_types(dtype, target.dtype)
            if self.weight is not None:
                dtype = torch.promote_types(dtype, self.weight.dtype)
        return dtype

    def _losses(
        self, input: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = input.to(at_least_float32(self._dtype(input, target)))
        # Exponentials stay finite, and the logarithm of their sum keeps its digits.
        logits = logits - self._largest(logits.detach()).unsqueeze(1)
        if target.is_floating_point():
            return self._losses_of_probabilities(logits, target.to(logits.dtype), classes)
        return self._losses_of_indices(logits, target.long(), classes)

    def _losses_of_indices(
        self, logits: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights(target, classes, logits.dtype)
        # What is multiplied with the logits adds up to ``share``, for each sample.
        share, taken = weights, weights * self._of_target(logits, target, classes)
        if self.label_smoothing:
            spread = self.label_smoothing / max(1, classes.extent)
            of_classes = self._class_weights(logits, classes)
            every = classes.extent if self.weight is None else self.weight.to(logits.dtype).sum()
            share = (1 - self.label_smoothing) * share + spread * every
            taken = (1 - self.label_smoothing) * taken + spread * (logits * of_classes).sum(1)
        sums = self._sum_over_line(torch.stack([logits.exp().sum(1), taken], dim=1))
        losses = sums[:, 0].log() * share - sums[:, 1]
        return self._unless_ignored(losses, target), weights

    def _losses_of_probabilities(
        self, logits: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.label_smoothing:
            spread = self.label_smoothing / max(1, classes.extent)
            target = target * (1 - self.label_smoothing) + spread
        target = target * self._class_weights(logits, classes)
        parts = [logits.exp().sum(1), (target * logits).sum(1), target.sum(1)]
        sums = self._sum_over_line(torch.stack(parts, dim=1))
        losses = sums[:, 0].log() * sums[:, 2] - sums[:, 1]
        return losses, torch.ones_like(losses)

    def _class_weights(self, logits: torch.Tensor, classes: _Classes) -> torch.Tensor:
        """Those of this worker's classes, to be broadcast to the logits."""
        if self.weight is None:
            return logits.new_ones(())
        weight = self.weight[classes.first : classes.last].to(logits.dtype)
        return weight.reshape(-1, *(1,) * (logits.dim() - 2))

    def _largest(self, logits: torch.Tensor) -> torch.Tensor:
        """The largest logit of each sample over all classes."""
        if logits.shape[1]:
            largest = logits.amax(1)
        else:
            shape = logits.shape[:1] + logits.shape[2:]
            largest = logits.new_full(shape, -torch.inf)
        if self._line.size == 1 or not self._line.active:
            return largest
        return all_reduce_constant(largest, self._line, "max")
