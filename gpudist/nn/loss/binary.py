"""Elementwise losses of two classes: only the total is communicated."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.geometry.cartesian import pad_left
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.loss.base import DistributedElementLoss, Reduction, no_cells
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.ops.operator import own_index, require_cartesian
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.world.partition import CartesianPartition, Partition


class _WeightedElementLoss(DistributedElementLoss):
    """Loss with weighted cells; the mean still divides by the number of cells."""

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        reduction: Reduction = "mean",
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss=P_loss)
        # The global position of a weight for this worker's cells alone is unknown.
        self.register_buffer("weight", weight, persistent=_is_whole(weight, P_x))
        self.weight: torch.Tensor | None

    def _placements(self) -> dict[str, ParameterPlacement]:
        return {
            name: ParameterPlacement.on(self.P_loss, buffer.shape)
            for name, buffer in self.named_buffers(recurse=False)
            if name not in self._non_persistent_buffers_set
        }

    def _own_weight(self, shape: torch.Size) -> torch.Tensor | None:
        """Return the weight of this worker's cells; raise if it cannot be broadcast to them."""
        if self.weight is None:
            return None
        if not self.P_x.active:
            return no_cells(self.weight)
        if not _broadcasts(self.weight.shape, shape):
            self._refuse(
                f"the weight's block has shape {list(self.weight.shape)}, which cannot be "
                f"broadcast to {list(shape)}"
            )
        return self.weight


@layer(F.binary_cross_entropy, Sample((6, 5, 4), "fractions"), Sample((6, 5, 4), "fractions"))
class DistributedBCELoss(_WeightedElementLoss):
    """Binary cross-entropy of probabilities.

    Logarithms are clamped at -100, as in torch; see
    :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        weight: weight of this worker's cells: a block that can be broadcast to the input's block.
            The state dict omits it if it has more than one cell along a split dim.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        P_loss: see the base class.

    Raises:
        ShapeError: on every worker, for inputs and targets outside 0 to 1.
    """

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = self._own_weight(input.shape)
        self._check_values("_check_probabilities", input)
        self._check_values("_check_probabilities", target)
        return F.binary_cross_entropy(input, target, weight, reduction="none")

    def _check_probabilities(self, x: torch.Tensor) -> None:
        if not ((x >= 0) & (x <= 1)).all():
            self._refuse("a cell of the input or the target is not between 0 and 1")


@layer(F.binary_cross_entropy_with_logits, Sample((6, 5, 4)), Sample((6, 5, 4), "fractions"))
class DistributedBCEWithLogitsLoss(_WeightedElementLoss):
    """Binary cross-entropy of logits; see :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike; one axis per dim if
            ``pos_weight`` has dims.
        weight: weight of this worker's cells: a block that can be broadcast to the input's block.
            The state dict omits it if it has more than one cell along a split dim.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        pos_weight: weight of positive targets: a whole tensor on every worker that can be broadcast
            to the global input, such as ``[C]`` if the last dim is the class dim.
        P_loss: see the base class.

    Cost:
        With a ``pos_weight``, the ranks agree at the first call on the blocks along the axes on
        which it varies.

    Raises:
        ShapeError: on every worker, if ``pos_weight`` cannot be broadcast to the input.
        PlanMismatch: the blocks change along an axis on which ``pos_weight`` varies.
    """

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        reduction: Reduction = "mean",
        pos_weight: torch.Tensor | None = None,
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, weight, reduction, P_loss=P_loss)
        self.register_buffer("pos_weight", pos_weight)
        self.pos_weight: torch.Tensor | None
        if pos_weight is not None and pos_weight.dim():
            require_cartesian(self._name, P_x)
            assert isinstance(P_x, CartesianPartition)
            self._agree_along(P_x, pos_weight.shape)

    def _agree_along(self, P_x: CartesianPartition, shape: torch.Size) -> None:
        if len(shape) > P_x.dim:
            raise ShapeError(
                f"{self._name}: pos_weight has shape {list(shape)} but P_x only {P_x.dim} axes; "
                "give it one axis per dim of the input"
            )
        first = P_x.dim - len(shape)
        line = P_x.along([first + d for d, extent in enumerate(shape) if extent != 1])
        self._agree_on(line, P_x.dim)

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = self._own_weight(input.shape)
        pos_weight = self._own_pos_weight(input)
        return F.binary_cross_entropy_with_logits(
            input, target, weight, pos_weight=pos_weight, reduction="none"
        )

    def _own_pos_weight(self, input: torch.Tensor) -> torch.Tensor | None:
        if self.pos_weight is None:
            return None
        if not self.P_x.active:
            return no_cells(self.pos_weight)
        if not self.pos_weight.dim():
            return self.pos_weight
        return self.pos_weight[self._bindings(input, self._agree_and_bind)]

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> tuple[slice, ...]:
        assert self.pos_weight is not None
        index, cut = own_index(self.P_x), layout.decomposition
        shape = self.pos_weight.shape
        if not _broadcasts(shape, cut.shape):
            self._refuse(
                f"pos_weight has shape {list(shape)}, which cannot be broadcast to the global "
                f"input's {list(cut.shape)}"
            )
        return tuple(
            slice(None) if extent == 1 else slice(*cut.dims[axis].block(index[axis]))
            for axis, extent in enumerate(shape, x.dim() - len(shape))
        )


@layer(F.soft_margin_loss, Sample((6, 5, 4)), Sample((6, 5, 4), "signs"))
class DistributedSoftMarginLoss(DistributedElementLoss):
    """Mean of ``log(1 + exp(-target * input))`` for targets 1 and -1.

    See :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as torch's loss.
        P_loss: workers that call the loss and get its value, by default the whole world.
    """

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.soft_margin_loss(input, target, reduction="none")


@layer(F.hinge_embedding_loss, Sample((6, 5, 4)), Sample((6, 5, 4), "signs"))
class DistributedHingeEmbeddingLoss(DistributedElementLoss):
    """Mean of ``input`` for targets 1, and of ``max(0, margin - input)`` for targets -1.

    See :class:`~gpudist.nn.loss.base.DistributedElementLoss`.

    Args:
        P_x: partition of input and target, which are split alike.
        margin: distance from which a negative target has no loss.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        P_loss: see the base class.
    """

    def __init__(
        self,
        P_x: Partition,
        margin: float = 1.0,
        reduction: Reduction = "mean",
        *,
        P_loss: Partition | None = None,
    ) -> None:
        super().__init__(P_x, reduction, P_loss=P_loss)
        self.margin = margin

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.hinge_embedding_loss(input, target, self.margin, reduction="none")


def _is_whole(weight: torch.Tensor | None, P_x: Partition) -> bool:
    if weight is None or weight.numel() == 1:
        return True
    parts = pad_left(P_x.shape, max(P_x.dim, weight.dim()), 1)[-weight.dim() :]
    return all(n == 1 or cut == 1 for n, cut in zip(weight.shape, parts, strict=True))


def _broadcasts(shape: torch.Size, to: tuple[int, ...]) -> bool:
    behind = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape, behind, strict=True))
