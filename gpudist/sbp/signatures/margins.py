"""Losses composed of other operators: margins, distances and likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.geometry.layout import broadcast, partial_sum, split
from gpudist.nn.loss.cosine_embedding import losses_of_rows, sums_of_rows
from gpudist.nn.loss.likelihood import gaussian_losses
from gpudist.sbp.call import Call
from gpudist.sbp.registry import SbpSignature, Where, compose, register
from gpudist.sbp.signatures.losses import mean_of_block, reduction_of


def reduce_losses(
    loss: Tensor, reduction: str, size_average: Any = None, reduce: Any = None
) -> Tensor:
    """Reduce the losses to their sum or mean, as ``reduction`` says."""
    if size_average is not None or reduce is not None:
        raise NotImplementedError(
            "losses of global tensors do not support size_average and reduce; use reduction"
        )
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


def _require_equal_dims(name: str, *tensors: Tensor) -> None:
    if len({x.dim() for x in tensors}) > 1:
        shapes = ", ".join(str(list(x.shape)) for x in tensors)
        raise RuntimeError(f"{name}: the tensors must have as many dims as each other: {shapes}")


@compose(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    _require_equal_dims("margin_ranking_loss", input1, input2, target)
    loss = (margin - target * (input1 - input2)).clamp_min(0)
    return reduce_losses(loss, reduction, size_average, reduce)


@compose(F.cosine_embedding_loss)
def cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    _require_equal_dims("cosine_embedding_loss", input1, input2)
    if target.dim() != input1.dim() - 1:
        raise RuntimeError(
            f"cosine_embedding_loss: inputs of shape {list(input1.shape)} need a target of shape "
            f"{list(input1.shape[:-1])}, not {list(target.shape)}"
        )
    sums: Any = sums_of_rows(input1, input2)
    # The three sums together, in one message.
    sums = sums.to_global(
        sbp=[broadcast if attribute == partial_sum else attribute for attribute in sums.sbp]
    )
    return reduce_losses(losses_of_rows(sums, target, margin), reduction, size_average, reduce)


@compose(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute the loss for one variance, one per cell, or one per line along the last dim."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input.detach(), var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    other = [m for n, m in zip(input.shape, var.shape, strict=False) if n != m]
    if var.dim() != input.dim() or other not in ([], [1]):
        raise ValueError(
            f"gaussian_nll_loss: var has the shape {list(var.shape)}; inputs of shape "
            f"{list(input.shape)} need one value each, or one for each line of one dim"
        )
    return reduce_losses(gaussian_losses(input, target, var, full, eps), reduction)


@compose(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    def distance(x: Tensor, y: Tensor) -> Tensor:
        return F.pairwise_distance(x, y, p, eps)

    loss = _of_triplets(anchor, positive, negative, distance, margin, swap)
    return reduce_losses(loss, reduction, size_average, reduce)


@compose(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    distance = distance_function or F.pairwise_distance
    return reduce_losses(
        _of_triplets(anchor, positive, negative, distance, margin, swap), reduction
    )


def _of_triplets(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
    margin: float,
    swap: bool,
) -> Tensor:
    _require_equal_dims("triplet_margin_loss", anchor, positive, negative)
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (margin + near - far).clamp_min(0)


@compose(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Tensor:
    loss = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return reduce_losses(loss.mean(-1), reduction, size_average, reduce)


@register(F.multi_margin_loss, F.multilabel_margin_loss, any_cuts=True)
def loss_of_samples(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples only."""
    reduction, (x, *_) = reduction_of(call), call.tensors
    if reduction is None or x.dims < 2:
        return []
    y = split(0) if reduction == "none" else partial_sum
    weights = (broadcast,) * (len(call.tensors) - 2)
    run = None if reduction == "none" else _run
    return [SbpSignature((split(0), split(0), *weights), (y,), run=run)]


def _run(call: Call, tensors: Sequence[Tensor], where: Where) -> Tensor:
    if not tensors[0].shape[0]:
        return tensors[0].sum()
    if reduction_of(call) == "sum":
        return call(tensors)
    losses = call.with_argument(99, "reduction", "none")(tensors)
    return mean_of_block(losses, where.call.shapes[0][0])
