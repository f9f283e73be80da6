"""Elementwise losses of two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.autocast import widen
from gpudist.sbp.call import Call, Slot
from gpudist.sbp.registry import SbpSignature, Where, name_of, register
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
        checks_values = call.function is F.binary_cross_entropy
        return [replace(s, run=_run) if checks_values else s for s in splits(call)]
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
    reduced = call.with_argument(99, "reduction", "sum" if reduction == "sum" else "none")
    try:
        losses = reduced(tensors)
    except RuntimeError as error:
        # The kernels of CPUs read the values, of which other workers have others.
        if "between 0 and 1" not in str(error):
            raise
        where.P.wire.refuse(ShapeError(f"{name_of(call.function)}: {error}"))
    if reduction in ("sum", "none"):
        return losses
    weight = call.kwargs.get("weight")
    if call.function in _MEANS_BY_WEIGHT and isinstance(weight, Slot):
        axes = axes_that_split(where, weight.number, range(tensors[weight.number].dim()))
        weights = widen(tensors[weight.number]).sum()
        return mean_of_block(losses, total(weights, where, axes))
    shape = result_shape(where.call)
    return mean_of_block(losses, shape[0] if reduction == "batchmean" else prod(shape))
