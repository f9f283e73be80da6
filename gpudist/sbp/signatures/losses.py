"""Elementwise losses of two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.autocast import widen
from gpudist.sbp.call import Call, Slot
from gpudist.sbp.registry import SbpSignature, Where, register
from gpudist.sbp.signatures.across import axes_that_split, total
from gpudist.sbp.signatures.elementwise import align_attribute, splits

LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss, F.poisson_nll_loss,
    F.hinge_embedding_loss,
)  # fmt: skip
# Losses whose mean divides by the sum of the weights.
_MEANS_BY_WEIGHT = (F.mse_loss, F.l1_loss)


def reduction_of(call: Call) -> str | None:
    """Return ``"none"``, ``"sum"`` or ``"mean"``; ``None`` if given by deprecated arguments."""
    if call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None:
        return None
    return call.kwargs.get("reduction", "mean")


def result_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the losses of the cells."""
    return tuple(torch.broadcast_shapes(*call.shapes))


@register(*LOSSES, any_cuts=True)
def loss_of_cells(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; each block computes a term of the sum or of the mean."""
    reduction = reduction_of(call)
    if reduction is None:
        return []
    if reduction == "none":
        return list(splits(call))
    shape = result_shape(call)
    signatures: list[SbpSignature] = []
    for d in range(len(shape)):
        inputs = tuple(align_attribute(shape_of_input, d, shape) for shape_of_input in call.shapes)
        if any(attribute != broadcast for attribute in inputs):
            signatures.append(SbpSignature(inputs, (partial_sum,), run=_run))
    return signatures


def mean_of_block(losses: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
    """Return this block's term of a mean; the sum of 16-bit losses may exceed their largest."""
    return (widen(losses).sum() / divisor).to(losses.dtype)


def _run(call: Call, tensors: Sequence[torch.Tensor], where: Where) -> torch.Tensor:
    reduction = reduction_of(where.call)
    if reduction == "sum":
        return call.with_argument(99, "reduction", "sum")(tensors)
    losses = call.with_argument(99, "reduction", "none")(tensors)
    weight = call.kwargs.get("weight")
    if call.function in _MEANS_BY_WEIGHT and isinstance(weight, Slot):
        axes = axes_that_split(where, weight.number, range(tensors[weight.number].dim()))
        weights = widen(tensors[weight.number]).sum()
        return mean_of_block(losses, total(weights, where, axes))
    shape = result_shape(where.call)
    return mean_of_block(losses, shape[0] if reduction == "batchmean" else prod(shape))
