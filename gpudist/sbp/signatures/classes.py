"""Losses over classes, which may be split: each worker handles the targets of its own classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.nn.autocast import widen
from gpudist.sbp.call import Call, Slot
from gpudist.sbp.registry import SbpSignature, Where, compose, register
from gpudist.sbp.signatures.across import axes_that_split, total
from gpudist.sbp.signatures.losses import mean_of_block, reduction_of
from gpudist.sbp.signatures.margins import reduce_losses


def _slot(call: Call, position: int, name: str) -> int | None:
    argument = call.get(position, name)
    return argument.number if isinstance(argument, Slot) else None


def _signature(
    call: Call, x: Sbp, target: Sbp, weight: Sbp, y: Sbp, run: Any = None
) -> SbpSignature:
    by_slot = {_slot(call, 0, "input"): x, _slot(call, 1, "target"): target}
    by_slot[_slot(call, 2, "weight")] = weight
    return SbpSignature(tuple(by_slot[i] for i in range(len(call.tensors))), (y,), run=run)


@register(F.nll_loss, any_cuts=True)
def nll_loss(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples or classes; linear in the log-probabilities."""
    reduction = reduction_of(call)
    x = call.tensors[_slot(call, 0, "input") or 0]
    classes = min(x.dims - 1, 1)
    if reduction is None:
        return []
    target = call.shapes[_slot(call, 1, "target") or 0]
    if target != (*x.shape[:classes], *x.shape[classes + 1 :]):
        raise RuntimeError(
            f"size mismatch: scores of shape {list(x.shape)} have targets of shape "
            f"{list(x.shape[:classes] + x.shape[classes + 1 :])}, but these have {list(target)}; "
            "if they are this worker's block, make them global, gpudist.to_global(target, "
            "scores.placement, sbp), or use gpudist.nn.DistributedCrossEntropyLoss"
        )
    samples = [d for d in range(x.dims) if d != classes]
    results = [split(i) if reduction == "none" else partial_sum for i in range(len(samples))]
    return [
        *(
            _signature(call, split(d), split(i), broadcast, results[i], _run)
            for i, d in enumerate(samples)
        ),
        _signature(call, split(classes), broadcast, split(0), partial_sum, _run),
        _signature(call, partial_sum, broadcast, broadcast, partial_sum),
    ]


def _run(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    slot = _slot(call, 0, "input") or 0
    x, target = tensors[slot], tensors[_slot(call, 1, "target") or 0]
    number = _slot(call, 2, "weight")
    weight = None if number is None else tensors[number]
    classes = min(x.dim() - 1, 1)
    reduction = reduction_of(where.call)
    ignored = call.kwargs.get("ignore_index", -100)
    first, extent = where.inputs[slot].start[classes], where.call.tensors[slot].shape[classes]
    is_ignored = target == ignored
    target = target.long()
    is_class = (target >= 0) & (target < extent)
    torch._assert_async(
        (is_ignored | is_class).all(), "nll_loss: a target is not a class or ignore_index"
    )
    losses, weights = _of_samples(x, target - first, is_ignored, weight, classes)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    axes = axes_that_split(where, slot, [d for d in range(x.dim()) if d != classes])
    if weight is not None:
        axes += axes_that_split(where, slot, [classes])
    return mean_of_block(losses, total(widen(weights).sum(), where, axes))


def _of_samples(
    x: torch.Tensor,
    target: torch.Tensor,
    is_ignored: torch.Tensor,
    weight: torch.Tensor | None,
    classes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this block's part of the loss of each sample, and the weight of each sample."""
    count = x.shape[classes]
    if not count:
        nothing = x.sum(classes)
        # The weight of a class counts on the worker that holds the class.
        return nothing, nothing.detach() + ~is_ignored if weight is None else nothing.detach()
    is_own = (target >= 0) & (target < count) & ~is_ignored
    index = target.clamp(0, count - 1)
    picked = x.gather(classes, index.unsqueeze(classes)).squeeze(classes)
    weights = (~is_ignored).to(x.dtype)
    if weight is not None:
        weights = weight[index].where(is_own, 0)
        picked = picked * weights
    return -picked.where(is_own, 0), weights


@compose(F.cross_entropy)
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute cross entropy as log-softmax followed by negative log-likelihood."""
    if size_average is not None or reduce is not None:
        raise NotImplementedError(
            "cross_entropy of global tensors does not support size_average and reduce; use "
            "reduction"
        )
    classes = min(input.dim() - 1, 1)
    is_index = not target.is_floating_point()
    count = input.shape[classes : classes + 1]
    if not (is_index or target.shape == input.shape) or (
        weight is not None and weight.shape != count
    ):
        raise RuntimeError(
            f"cross_entropy of scores of shape {list(input.shape)}: probabilities have the same "
            f"shape, not {list(target.shape)}, and a weight has {list(count)}"
        )
    logs = F.log_softmax(input, classes)
    if not is_index:
        target = target * (1 - label_smoothing) + label_smoothing / logs.shape[classes]
        return _reduce(_of_probabilities(logs, target, weight), None, reduction)
    options: dict[str, Any] = {"ignore_index": ignore_index}
    loss = F.nll_loss(logs, target, weight, reduction=reduction, **options)
    if not label_smoothing:
        return loss
    uniform = torch.ones_like(logs) / logs.shape[classes]
    # Ignored samples get no gradient, even if all are ignored and the mean is not a number.
    smooth = _of_probabilities(logs, uniform, weight).masked_fill(target == ignore_index, 0)
    weights = None
    if reduction == "mean":
        # A log-probability of -1 for every class gives the weight of each sample, zero if ignored.
        certain, options["reduction"] = -torch.ones_like(logs), "none"
        weights = F.nll_loss(certain, target, weight, **options)
    smooth = _reduce(smooth, weights, reduction)
    return (1 - label_smoothing) * loss + label_smoothing * smooth


def _of_probabilities(
    logs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    classes = min(logs.dim() - 1, 1)
    if weight is not None:
        target = target * weight.reshape(-1, *(1,) * (logs.dim() - classes - 1))
    return -(logs * target).sum(classes)


def _reduce(losses: torch.Tensor, weights: torch.Tensor | None, reduction: str) -> torch.Tensor:
    if weights is None or reduction != "mean":
        return reduce_losses(losses, reduction)
    return losses.sum() / weights.sum()
