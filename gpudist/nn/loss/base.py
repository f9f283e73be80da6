"""Base classes of losses: one value on every worker, with the sequential gradient."""

from __future__ import annotations

from typing import ClassVar, Literal, NoReturn

import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange.torch_library import handles_of
from gpudist.exchange.tracing import is_recorded
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.partitions import require_axes
from gpudist.nn.tensor_parallel.conventions import Expectation
from gpudist.nn.tensor_parallel.invariant import sum_once
from gpudist.ops.all_sum_reduce import AllSumReduce
from gpudist.ops.operator import require_cartesian
from gpudist.ops.shape_agreement import refuse
from gpudist.world.partition import CartesianPartition, Partition, require_one_world

Reduction = Literal["mean", "sum", "none"]


class DistributedLoss(DistributedModule):
    """Loss over blocks on ``P_x``.

    Every worker of ``P_loss`` calls the loss and gets bitwise the same value. If all of them call
    ``backward()``, the gradients equal those of the sequential loss. Workers outside ``P_x`` pass
    zero-volume placeholders, with the dtypes of the other workers' blocks. Sums are taken at least
    in float32, and the value has the dtype of torch's loss.

    Args:
        P_x: partition of the input.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for this worker's block of the losses.
        P_loss: workers that call the loss and get its value, by default the whole world; must
            contain ``P_x``.

    Cost:
        One all-reduce of two numbers; no communication in backward. Without a reduction, no
        communication at all.

    Raises:
        PartitionError, ShapeError: at construction, for arguments that torch also rejects; at a
            call, on every worker, if one worker's block does not fit its input or has values that
            torch rejects. On a GPU, checking values would make the host wait: there, such values
            make the loss NaN or fail in torch's kernel.
        ConventionError: on every worker, at the first call with such a graph, if the input has the
            full gradient on each worker, like full outputs of tensor-parallel layers in the
            invariant convention.
    """

    _shown = ("reduction",)
    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none")

    def __init__(
        self, P_x: Partition, reduction: Reduction = "mean", *, P_loss: Partition | None = None
    ) -> None:
        super().__init__()
        if reduction not in self.reductions:
            *others, last = map(repr, self.reductions)
            raise ShapeError(
                f"{self._name}: reduction is {reduction!r}; use {', '.join(others)} or {last}"
            )
        self.P_x = P_x
        self.P_loss = P_loss if P_loss is not None else P_x.world
        self._P_total = self.P_loss
        require_one_world(self._name, P_x, self.P_loss)
        outside = sorted(set(P_x.ranks) - set(self.P_loss.ranks))
        if outside:
            raise PartitionError(
                f"{self._name}: world ranks {outside} of P_x are not in P_loss; pass a P_loss "
                "that contains P_x"
            )
        self.reduction = reduction
        self._expectation = Expectation(self._name, "dual")

    def _value(
        self, losses: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return losses.to(dtype) if self.reduction == "none" else self._total(losses, weights, dtype)

    def _total(
        self, losses: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if not dtype.is_floating_point:
            raise ShapeError(f"{self._name}: losses of {dtype} have no gradient; use a float input")
        # 16-bit numbers count only to 2048 (float16) or 256 (bfloat16).
        wide = torch.promote_types(losses.dtype, torch.float32)
        loss, weight = losses.sum(dtype=wide), weights.sum(dtype=wide)
        if self._P_total.size > 1:
            parts = torch.stack([loss, weight])
            self._expectation(parts, self._P_total)
            loss, weight = sum_once(parts, self._P_total).unbind()
        return (loss if self.reduction == "sum" else loss / weight.detach()).to(dtype)

    def _check_shape(self, what: str, x: torch.Tensor, expected: torch.Size) -> None:
        if x.shape != expected:
            self._refuse(
                f"the {what}'s block has shape {list(x.shape)}, not {list(expected)}; pass this "
                "rank's block, which gpudist.scatter makes of a whole tensor"
            )

    def _check_values(self, method: str, x: torch.Tensor, *numbers: int) -> None:
        """Call the method with ``x`` for its errors, except on a GPU, where the host would wait."""
        if x.device.type != "cpu":
            return
        if is_recorded(x):
            (loss,) = handles_of(self)
            torch.ops.gpudist.check(loss, x, method, [*numbers], None)
        else:
            getattr(self, method)(x, *numbers)

    def _refuse(self, text: str) -> NoReturn:
        refuse(self.P_loss, ShapeError(f"{self._name}: {text}"))


class DistributedElementLoss(DistributedLoss):
    """Loss with one number for each cell of an input split over ``P_x`` along any dims.

    Input and target are split alike; neither is broadcast to the other.
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.P_x.active:
            self._check_shape("target", target, input.shape)
        else:
            input, target = no_cells(input), no_cells(target)
        losses = self._losses(input, target)
        return self._value(losses, self._weight(losses), losses.dtype)

    def _losses(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _weight(self, losses: torch.Tensor) -> torch.Tensor:
        return number(losses.numel(), losses)


class DistributedSampleLoss(DistributedLoss):
    """Loss with one number for each sample of an input ``[B, C, *spatial]`` split over ``P_x``.

    ``P_x`` has one axis per dim and may split any of them. Without a reduction, workers at index 0
    of axis 1 return their losses ``[B, *spatial]`` and others an empty tensor, so that every sample
    counts once.
    """

    def __init__(
        self, P_x: CartesianPartition, reduction: Reduction, P_loss: Partition | None
    ) -> None:
        super().__init__(P_x, reduction, P_loss=P_loss)
        require_cartesian(self._name, P_x)
        require_axes(self._name, P_x, P_x.dim >= 2, "an axis for the batch and one for dim 1")
        # Samples are independent: only workers that hold parts of the same samples need to agree.
        self._line = P_x.along([1])
        self._sum = AllSumReduce(self._line, [1])

    def _sum_over_line(self, x: torch.Tensor) -> torch.Tensor:
        if self._line.size == 1 or not self._line.active:
            return x
        self._expectation(x, self._line)
        return self._sum(x)

    def _value(
        self, losses: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        # All workers along axis 1 have every loss of their samples; only the first counts them.
        if self.P_x.index is not None and self.P_x.index[1] > 0:
            losses, weights = no_cells(losses), no_cells(weights)
        return super()._value(losses, weights, dtype)


def no_cells(x: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor derived from ``x``, for the computation outside ``P_x``."""
    return x.reshape(-1)[:0]


def number(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return ``n`` as a tensor filled on the device of ``like``, without a copy from the host."""
    return torch.full((), n, device=like.device)
