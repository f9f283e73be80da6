"""Losses over classes, which may be split: sums over classes send a few numbers per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange.autograd import all_reduce_constant
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.loss.base import DistributedSampleLoss, Reduction, no_cells
from gpudist.nn.norm.softmax import largest_of_block
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class _Classes:
    """Global number of classes, and the range of classes of this worker."""

    extent: int
    first: int
    last: int


class _ClassLoss(DistributedSampleLoss):
    def __init__(
        self,
        P_x: CartesianPartition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        *,
        P_loss: Partition | None = None,
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
        self._agree_on(self._line, P_x.dim)

    def _placements(self) -> dict[str, ParameterPlacement]:
        if self.weight is None:
            return {}
        return {"weight": ParameterPlacement.on(self.P_loss, self.weight.shape)}

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.P_x.active:
            classes: _Classes = self._bindings(input, self._agree_and_bind)
            self._check_target(input, target, classes)
        else:
            # The same computation as on other workers, for no samples and one class.
            classes = _Classes(1, 0, 1)
            input = no_cells(input).reshape(0, 1)
            target = no_cells(target)
            target = target.reshape(0, 1) if target.is_floating_point() else target
        losses, weights = self._losses(input, target, classes)
        return self._value(losses, weights, self._dtype(input, target))

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> _Classes:
        classes = layout.decomposition.dims[1]
        if self.weight is not None and len(self.weight) != classes.extent:
            self._refuse(
                f"the weight has {len(self.weight)} elements, but the global input has "
                f"{classes.extent} classes"
            )
        return _Classes(classes.extent, *classes.block(own_index(self.P_x)[1]))

    def _check_target(self, input: torch.Tensor, target: torch.Tensor, classes: _Classes) -> None:
        shape = input.shape[:1] + input.shape[2:]
        if target.dim() == input.dim() and target.numel() == shape.numel():
            self._refuse(
                f"the target's block has shape {list(target.shape)}, not {list(shape)}: class "
                "indices have no dim of classes; use target.squeeze(1)"
            )
        self._check_shape("target", target, shape)
        if target.dtype not in (torch.int64, torch.uint8):
            self._refuse(
                f"the target has dtype {target.dtype}; class indices must be int64 or uint8"
            )
        self._check_values("_check_classes", target, classes.extent)

    def _check_classes(self, target: torch.Tensor, classes: int) -> None:
        wrong = target[self._is_none(target.long(), classes)]
        if wrong.numel():
            self._refuse(f"target {wrong[0].item()} is not one of the classes 0 to {classes - 1}")

    def _is_none(self, target: torch.Tensor, classes: int) -> torch.Tensor:
        return ((target < 0) | (target >= classes)) & (target != self.ignore_index)

    def _dtype(self, input: torch.Tensor, target: torch.Tensor) -> torch.dtype:
        return input.dtype

    def _losses(
        self, input: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _weights(self, target: torch.Tensor, classes: _Classes, dtype: torch.dtype) -> torch.Tensor:
        # The weight is 0 for an ignored sample, and NaN for an index without a class.
        counts = target != self.ignore_index
        weights = counts.to(dtype)
        if self.weight is not None and classes.extent:
            index = (target * counts).clamp(0, classes.extent - 1)
            weights = weights * self.weight.to(dtype)[index]
        return weights.masked_fill(self._is_none(target, classes.extent), torch.nan)

    def _unless_ignored(self, losses: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.where(target != self.ignore_index, losses, torch.zeros_like(losses))

    def _has_all(self, classes: _Classes) -> bool:
        # On every worker alike, since otherwise workers along the line exchange their sums. Then
        # torch's kernel computes losses.
        return self.P_x.active and self.P_x.shape[1] == 1 and classes.extent > 0

    def _by_torch(
        self,
        function: Any,
        input: torch.Tensor,
        target: torch.Tensor,
        classes: _Classes,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses and weights of samples of which this worker has every class.

        Sums of torch's kernels for GPUs depend on the order in which threads end.
        """
        weight = None if self.weight is None else self.weight.to(input.dtype)
        if target.is_floating_point():
            losses = function(input, target.to(input.dtype), weight, reduction="none", **options)
            return losses, torch.ones_like(losses)
        target = target.long()
        options |= {"reduction": "none", "ignore_index": self.ignore_index}
        losses = function(input, target, weight, **options)
        if weight is None:
            return losses, target != self.ignore_index
        return losses, self._weights(target, classes, input.dtype)

    def _of_target(self, x: torch.Tensor, target: torch.Tensor, classes: _Classes) -> torch.Tensor:
        """Return ``x`` at each sample's class, on the worker that holds it; 0 on others."""
        first, last = classes.first, classes.last
        if first == last:
            return x.sum(1)
        here = (target >= first) & (target < last)
        local = (target - first).clamp(0, last - first - 1)
        picked = x.gather(1, local.unsqueeze(1)).squeeze(1)
        return torch.where(here, picked, torch.zeros_like(picked))


@layer(F.nll_loss, Sample((6, 5, 4)), Sample((6, 4), "classes", 5))
class DistributedNLLLoss(_ClassLoss):
    """Negative log-likelihood of log-probabilities ``[B, C, *spatial]`` split over ``P_x``.

    Any dims may be split, including the classes; see
    :class:`~gpudist.nn.loss.base.DistributedSampleLoss`. Targets are class indices; errors are
    those of :class:`DistributedCrossEntropyLoss`.

    Args:
        P_x ... P_loss: see :class:`DistributedCrossEntropyLoss`.

    Cost:
        Where classes are split, a sum of one number per sample along the class axis, in forward and
        in backward; and the all-reduce of the base class.
    """

    def _losses(
        self, input: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        if self._has_all(classes):
            return self._by_torch(F.nll_loss, input.to(wide), target, classes)
        target = target.long()
        picked = self._sum_over_line(self._of_target(input, target, classes).to(wide))
        weights = self._weights(target, classes, wide)
        return self._unless_ignored(-picked * weights, target), weights


@layer(F.cross_entropy, Sample((6, 5, 4)), Sample((6, 4), "classes", 5))
class DistributedCrossEntropyLoss(_ClassLoss):
    """Cross-entropy of logits ``[B, C, *spatial]`` split over ``P_x`` along any dims.

    The classes may be split too; see :class:`~gpudist.nn.loss.base.DistributedSampleLoss`.

    Targets are global class indices or class probabilities. As indices, each worker passes those of
    its block of batch and spatial dims, ``[B, *spatial]``, the same along the class axis. As
    probabilities, each worker passes a block split like the logits.

    Args:
        P_x: partition of the logits, one axis per dim; axis 1 splits the classes.
        weight: weight of each class, ``[C]`` with the global number of classes, on every worker.
        ignore_index: target index of samples to ignore.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: share of the target, 0 to 1, that is distributed evenly over all classes.
        P_loss: see the base class.

    Cost:
        Where classes are split, a maximum and a sum along the class axis of two numbers per sample
        (three for probabilities), and one such sum in backward. The all-reduce of the base class.
        16-bit logits are copied to float32.

    Raises:
        ShapeError: on every worker, for an index that is not a class, or a weight whose length is
            not the number of classes.
        PlanMismatch: the blocks of classes change between calls.
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
        super().__init__(P_x, weight, ignore_index, reduction, P_loss=P_loss)
        if not 0 <= label_smoothing <= 1:
            raise ShapeError(
                f"{self._name}: label_smoothing is {label_smoothing}; it must be between 0 and 1"
            )
        self.label_smoothing = label_smoothing

    def _check_target(self, input: torch.Tensor, target: torch.Tensor, classes: _Classes) -> None:
        are_indices = not target.is_floating_point() and target.shape != input.shape
        if target.dim() != input.dim() or are_indices:
            super()._check_target(input, target, classes)
            return
        self._check_shape("target", target, input.shape)
        if not target.is_floating_point():
            self._refuse(
                f"the target has dtype {target.dtype}; probabilities must be floating point"
            )
        if self.ignore_index >= 0:
            self._refuse(f"ignore_index={self.ignore_index}, but the targets are probabilities")

    def _dtype(self, input: torch.Tensor, target: torch.Tensor) -> torch.dtype:
        dtype = input.dtype
        if target.is_floating_point():
            dtype = torch.promote_types(dtype, target.dtype)
            if self.weight is not None:
                dtype = torch.promote_types(dtype, self.weight.dtype)
        return dtype

    def _losses(
        self, input: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = input.to(torch.promote_types(self._dtype(input, target), torch.float32))
        if self._has_all(classes):
            smoothing = {"label_smoothing": self.label_smoothing}
            return self._by_torch(F.cross_entropy, logits, target, classes, **smoothing)
        # Keeps exponentials finite, and the logarithm of their sum precise.
        logits = logits - self._largest(logits.detach()).unsqueeze(1)
        if target.is_floating_point():
            return self._losses_of_probabilities(logits, target.to(logits.dtype), classes)
        return self._losses_of_indices(logits, target.long(), classes)

    def _losses_of_indices(
        self, logits: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights(target, classes, logits.dtype)
        # The factors of each sample's logits add up to ``share``.
        share, taken = weights, weights * self._of_target(logits, target, classes)
        if self.label_smoothing:
            smoothing = self.label_smoothing / max(1, classes.extent)
            of_classes = self._class_weights(logits, classes)
            every = classes.extent if self.weight is None else self.weight.to(logits.dtype).sum()
            share = (1 - self.label_smoothing) * share + smoothing * every
            taken = (1 - self.label_smoothing) * taken + smoothing * (logits * of_classes).sum(1)
        sums = self._sum_over_line(torch.stack([logits.exp().sum(1), taken], dim=1))
        losses = sums[:, 0].log() * share - sums[:, 1]
        return self._unless_ignored(losses, target), weights

    def _losses_of_probabilities(
        self, logits: torch.Tensor, target: torch.Tensor, classes: _Classes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.label_smoothing:
            smoothing = self.label_smoothing / max(1, classes.extent)
            target = target * (1 - self.label_smoothing) + smoothing
        target = target * self._class_weights(logits, classes)
        parts = [logits.exp().sum(1), (target * logits).sum(1), target.sum(1)]
        sums = self._sum_over_line(torch.stack(parts, dim=1))
        losses = sums[:, 0].log() * sums[:, 2] - sums[:, 1]
        return losses, torch.ones_like(losses)

    def _class_weights(self, logits: torch.Tensor, classes: _Classes) -> torch.Tensor:
        if self.weight is None:
            return logits.new_ones(())
        weight = self.weight[classes.first : classes.last].to(logits.dtype)
        return weight.reshape(-1, *(1,) * (logits.dim() - 2))

    def _largest(self, logits: torch.Tensor) -> torch.Tensor:
        largest = largest_of_block(logits, 1).squeeze(1)
        if self._line.size == 1 or not self._line.active:
            return largest
        return all_reduce_constant(largest, self._line, "max")
