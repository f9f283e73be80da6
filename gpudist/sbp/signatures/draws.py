"""Random numbers, which depend on the global index of a cell within a converted network."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.random.cells import normal_by_index, uniform_by_index
from gpudist.sbp.registry import compose
from gpudist.sbp.scope import Scope, current_scope
from gpudist.sbp.signatures.dropout import next_draw
from gpudist.sbp.signatures.factories import copied, drawn_whole


def _by_index(x: Any, by: Any, dtype: torch.dtype, scope: Scope) -> Tensor:
    """Draw numbers by global index in the layout of ``x``, with copies in place of terms."""
    next_draw()
    sbp = tuple(broadcast if one == partial_sum else one for one in x.sbp)
    shape, placement = tuple(x.shape), x.placement
    if placement.index is None:
        return x._wrap(x._local.new_empty(0, dtype=dtype), placement, sbp, shape)
    box = placement.layout(sbp, shape).box(placement.index)
    seed, number = torch.tensor([scope.seed, scope.draws], device=x.device)
    return x._wrap(by(seed, number, box, shape, dtype, x.device), placement, sbp, shape)


def uniform_like(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Draw from [0, 1) in the layout of ``x``.

    Outside a converted network, every rank draws all cells.
    """
    scope, wanted = current_scope(), dtype or x.dtype
    if scope is not None:
        return _by_index(x, uniform_by_index, wanted, scope)
    return drawn_whole(torch.rand_like, False)(x, dtype=wanted)


def normal_like(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Draw from a standard normal distribution, like :func:`uniform_like`."""
    scope, wanted = current_scope(), dtype or x.dtype
    if scope is not None:
        return _by_index(x, normal_by_index, wanted, scope)
    return drawn_whole(torch.randn_like, False)(x, dtype=wanted)


def _filled(x: Tensor, values: Tensor) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not x.is_leaf):
        return x.copy_(values)


@compose(torch.rand_like)
def rand_like(input: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return uniform_like(input, dtype)


@compose(torch.randn_like)
def randn_like(input: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return normal_like(input, dtype)


@compose(Tensor.uniform_)
def uniform_(x: Tensor, low: float = 0, high: float = 1, **given: Any) -> Tensor:
    low, high = given.get("from", low), given.get("to", high)
    if current_scope() is None:
        return drawn_whole(Tensor.uniform_, True)(x, low, high)
    return _filled(x, low + (high - low) * uniform_like(x))


@compose(Tensor.normal_)
def normal_(x: Tensor, mean: float = 0, std: float = 1, **_: object) -> Tensor:
    if current_scope() is None:
        return drawn_whole(Tensor.normal_, True)(x, mean, std)
    return _filled(x, mean + std * normal_like(x))


@compose(Tensor.exponential_)
def exponential_(x: Tensor, lambd: float = 1, **_: object) -> Tensor:
    return _filled(x, -torch.log1p(-uniform_like(x)) / lambd)


@compose(torch.bernoulli, Tensor.bernoulli)
def bernoulli(input: Tensor, p: float | None = None, **_: object) -> Tensor:
    """Draw ones with the probabilities of the input, or with probability ``p``."""
    drawn = uniform_like(input.detach())
    return (drawn < (input.detach() if p is None else p)).to(input.dtype)


@compose(Tensor.bernoulli_)
def bernoulli_(x: Tensor, p: Any = 0.5, **_: object) -> Tensor:
    wide = torch.float64 if not x.is_floating_point() else x.dtype
    return _filled(x, (uniform_like(x, wide) < p).to(x.dtype))


@compose(F.rrelu, torch.rrelu)
def rrelu(
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if training:
        slopes: Any = lower + (upper - lower) * uniform_like(input.detach())
    else:
        slopes = (lower + upper) / 2
    found = torch.where(input >= 0, input, input * slopes)
    return input.copy_(found) if inplace else found


@compose(F.gumbel_softmax)
def gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Compute Gumbel softmax; hard results have the gradient of soft ones."""
    noise = torch.empty_like(logits.detach()).exponential_()
    soft = F.softmax((logits - noise.log()) / tau, dim)
    if not hard:
        return soft
    chosen = soft.detach().argmax(dim, keepdim=True)
    shape = [1] * logits.dim()
    shape[dim] = logits.shape[dim]
    places = copied(logits, torch.arange(prod(shape), device=logits.device).view(shape))
    return (places == chosen).to(soft.dtype) - soft.detach() + soft
