"""Random numbers, which depend on the global index of a cell within a converted network."""

from __future__ import annotations

from functools import partial
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.geometry.boxes import Box
from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.random.cells import Cells, bernoulli_by_index, normal_by_index, uniform_by_index
from gpudist.sbp.global_spec import local_of
from gpudist.sbp.registry import compose
from gpudist.sbp.scope import Draws, current_draws
from gpudist.sbp.signatures.dropout import key_of, next_draw
from gpudist.sbp.signatures.factories import copies_of_whole, draw_whole


def _by_index(x: Any, by: Any, dtype: torch.dtype, draws: Draws) -> Tensor:
    """Draw numbers by global index in the layout of ``x``, with copies in place of terms.

    A plain tensor is whole. Real and imaginary parts are two draws.
    """
    if dtype.is_complex:
        real, imaginary = [_by_index(x, by, dtype.to_real(), draws) for _ in range(2)]
        return torch.complex(real, imaginary)
    next_draw()
    if not hasattr(x, "placement"):
        cells = Cells(Box.whole(x.shape), tuple(x.shape))
        return by(key_of(draws, x.device), cells, dtype, x.device)
    sbp = tuple(broadcast if attribute == partial_sum else attribute for attribute in x.sbp)
    shape, placement = tuple(x.shape), x.placement
    if placement.index is None:
        return x._wrap(x._local.new_empty(0, dtype=dtype), placement, sbp, shape)
    cells = Cells(placement.layout(sbp, shape).box(placement.index), shape)
    drawn = by(key_of(draws, x.device), cells, dtype, x.device)
    return x._wrap(drawn, placement, sbp, shape)


def uniform_like(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Draw from [0, 1) in the layout of ``x``.

    Outside a converted network, every rank draws all cells.
    """
    draws, wanted = current_draws(), dtype or x.dtype
    if draws is not None:
        return _by_index(x, uniform_by_index, wanted, draws)
    return draw_whole(torch.rand_like, False)(x, dtype=wanted)


def normal_like(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Draw from a standard normal distribution, like :func:`uniform_like`."""
    draws, wanted = current_draws(), dtype or x.dtype
    if draws is not None:
        drawn = _by_index(x, normal_by_index, wanted, draws)
        return drawn * sqrt(0.5) if wanted.is_complex else drawn
    return draw_whole(torch.randn_like, False)(x, dtype=wanted)


def _is_drawn_whole(x: Any, options: dict[str, Any]) -> bool:
    return hasattr(x, "placement") and (
        current_draws() is None or options.get("generator") is not None
    )


def _fill(x: Tensor, values: Tensor) -> Tensor:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not x.is_leaf):
        return x.copy_(values)


def _with_options(
    x: Tensor, device: Any = None, requires_grad: bool = False, **_: object
) -> Tensor:
    x = x if device is None else x.to(device)
    return x.requires_grad_() if requires_grad else x


@compose(torch.rand_like)
def rand_like(input: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return _with_options(uniform_like(input, dtype), **options)


@compose(torch.randn_like)
def randn_like(input: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return _with_options(normal_like(input, dtype), **options)


@compose(Tensor.uniform_)
def uniform_(x: Tensor, low: float = 0, high: float = 1, **options: Any) -> Tensor:
    low, high = options.pop("from", low), options.pop("to", high)
    if _is_drawn_whole(x, options):
        return draw_whole(Tensor.uniform_, True)(x, low, high, **options)
    return _fill(x, low + (high - low) * uniform_like(x))


@compose(Tensor.normal_)
def normal_(x: Tensor, mean: float = 0, std: float = 1, **options: Any) -> Tensor:
    if _is_drawn_whole(x, options):
        return draw_whole(Tensor.normal_, True)(x, mean, std, **options)
    return _fill(x, mean + std * normal_like(x))


@compose(Tensor.exponential_)
def exponential_(x: Tensor, lambd: float = 1, **options: Any) -> Tensor:
    if _is_drawn_whole(x, options):
        return draw_whole(Tensor.exponential_, True)(x, lambd, **options)
    return _fill(x, -torch.log1p(-uniform_like(x)) / lambd)


def _ones(x: Any, probability: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Draw ones with a probability, a number or a tensor, in the layout of ``x``."""
    draws, wanted = current_draws(), dtype or x.dtype
    is_own = probability is x and partial_sum not in getattr(x, "sbp", ())
    is_known = is_own or isinstance(probability, float)
    if draws is None or not (is_known and wanted.is_floating_point):
        return (uniform_like(x, dtype) < probability).to(x.dtype)
    cells = local_of(x) if is_own else probability
    by = partial(bernoulli_by_index, probability=cells)
    return _by_index(x, by, wanted, draws).to(x.dtype)


@compose(torch.bernoulli, Tensor.bernoulli)
def bernoulli(input: Tensor, p: float | None = None, **options: Any) -> Tensor:
    """Draw ones with the probabilities of the input, or with probability ``p``."""
    if options.get("generator") is not None:
        raise NotImplementedError("with a generator, the numbers depend on the order of all cells")
    x = input.detach()
    return _ones(x, x if p is None else p)


@compose(Tensor.bernoulli_)
def bernoulli_(x: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
    if options.get("generator") is not None:
        return draw_whole(Tensor.bernoulli_, True)(x, p, **options)
    wide = torch.float64 if not x.is_floating_point() else x.dtype
    return _fill(x, _ones(x, p, wide))


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
    y = torch.where(input >= 0, input, input * slopes)
    return input.copy_(y) if inplace else y


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
    places = copies_of_whole(logits, torch.arange(prod(shape), device=logits.device).view(shape))
    return (places == chosen).to(soft.dtype) - soft.detach() + soft
