"""Attention that drops weights, and torch's function, which may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.exchange.autograd import Saved, apply_handwritten, is_eager
from gpudist.geometry.boxes import Box
from gpudist.geometry.layout import broadcast
from gpudist.nn.attention.blockwise import safe_softmax
from gpudist.nn.autocast import LOW, product_dtype
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.nn.random.cells import Cells, Key
from gpudist.nn.random.drop import drop_by_index
from gpudist.sbp.call import Call, Compute
from gpudist.sbp.registry import SbpSignature, Where, compose, register
from gpudist.sbp.signatures.along_axis import without_cells
from gpudist.sbp.signatures.attention import (
    Options,
    attention,
    attention_of_blocks,
    repeat_heads,
)
from gpudist.sbp.signatures.channel_norms import call_rule
from gpudist.sbp.signatures.dropout import (
    check_probability,
    key_of,
    key_of_draw,
    next_draw,
)


def dropping_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> Tensor:
    """Placeholder for ``_attend``, which each worker computes on its block."""
    return attention(query, key, value, mask, *options)


@register(dropping_attention, replicable=False, any_cuts=True, draws_anew=True)
def dropping_attention_of_blocks(call: Call, parts: int) -> list[SbpSignature]:
    """Split like attention without dropout, but for whole sequences of some heads."""
    signatures = [signature for signature in attention_of_blocks(call, parts) if signature.nests]
    copies = SbpSignature((broadcast,) * len(call.tensors), (broadcast,))
    return [replace(signature, bind=_bind) for signature in (*signatures, copies)]


def _bind(call: Call, where: Where) -> Compute:
    box, options = where.outputs[0], Options.of(call)
    keys = where.call.shapes[1][-2]
    shape = (*where.call.outputs[0].shape[:-1], keys)
    cells = Cells(Box((*box.start[:-1], 0), (*box.stop[:-1], keys)), shape)
    hidden = _future_keys(cells, where.P.device) if options.is_causal else None

    def compute(tensors: Sequence[Tensor]) -> Any:
        q, k, v, *masks = tensors
        # Collective outside a converted network, so also of a worker without cells.
        key = key_of_draw(where.P, q.device)
        if not q.numel():
            return without_cells(box.shape, q.dtype, tensors)
        return _attend(q, k, v, masks[0] if masks else None, hidden, options, cells, key)

    return compute


def _future_keys(cells: Cells, device: torch.device) -> Tensor:
    rows, keys = cells.box.shape[-2:]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=device)
    return mask.triu_(cells.box.start[-2] + 1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    hidden: Tensor | None,
    options: Options,
    cells: Cells,
    draw: Key,
) -> Tensor:
    """Compute the attention of a block.

    Args:
        query, key, value, mask, options: arguments of torch's function.
        hidden: which keys causal queries do not attend to.
        cells: cells of all weights that this block computes.
        draw: key of the random numbers.
    """
    if options.enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    # Casts of autocast, which is off in backward.
    dtype, batch = product_dtype(query), cells.box.shape[:-2]
    q, k, v = (_expand_to_matrices(x.to(dtype), batch) for x in (query, key, value))
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask.expand(cells.box.shape)
    if isinstance(draw.call, Tensor):
        draw = draw._replace(call=draw.call.clone())  # may change before backward
    scale = 1 / sqrt(q.shape[-1]) if options.scale is None else options.scale
    dropping = _Dropping(scale, options.dropout_p, draw, cells, mask is not None)
    tensors = q, k, v, hidden
    y = apply_handwritten(dropping, *tensors) if is_eager(*tensors) else dropping.compose(*tensors)
    return y.view(*batch, *y.shape[-2:])


def _expand_to_matrices(x: Tensor, batch: Sequence[int]) -> Tensor:
    # Without gaps, so that no product copies it.
    x = x if x.shape[:-2] == batch else x.expand(*batch, *x.shape[-2:])
    return x.reshape(prod(batch), *x.shape[-2:])


@dataclass(frozen=True)
class _Dropping:
    """Attention that drops weights, as one node.

    On a device, backward computes the weights again, as torch's kernels do: those of a long
    sequence would be the largest tensors of a network, and two or three kernels compute them. A CPU
    keeps both. Which weights are dropped is drawn again for their gradient.
    """

    scale: float
    p: float
    key: Key
    cells: Cells
    has_mask: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        weights = self._weights(q, k, hidden)
        dropped = self._drop_and_cast(weights, v.dtype)
        return dropped @ v, (weights, dropped) if suits_cpu(q) else ()

    def backward(
        self, gradient: Tensor, inputs: Saved, kept: Saved, needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        q, k, v, hidden = inputs
        weights = kept[0] if kept else self._weights(q, k, hidden)
        dropped = kept[1] if kept else self._drop_and_cast(weights, v.dtype)
        gradient = gradient.contiguous()
        of_v = dropped.mT @ gradient if needs[2] else None
        of_kept = (gradient @ v.mT).to(weights.dtype)
        of_weights = self._drop_and_cast(of_kept.view(weights.shape), weights.dtype)
        softmax_backward: Any = torch._softmax_backward_data  # pyright: ignore
        of_scores = softmax_backward(of_weights.view(weights.shape), weights, -1, weights.dtype)
        of_hidden = of_scores.to(hidden.dtype) if needs[3] else None
        of_scores = of_scores.view(of_kept.shape).to(q.dtype)
        of_q = self._scaled(of_scores, k) if needs[0] else None
        of_k = self._scaled(of_scores.mT, q) if needs[1] else None
        return of_q, of_k, of_v, of_hidden

    def compose(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        return self._drop_and_cast(self._weights(q, k, hidden), v.dtype) @ v

    def _scaled(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=self.scale)

    def _weights(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
        scores = self._scaled(q, k.mT).view(self.cells.box.shape)
        if hidden is not None:
            is_bool = hidden.dtype == torch.bool
            scores = scores.masked_fill(hidden, -torch.inf) if is_bool else scores + hidden
        # Torch's weights of a query that sees no key are 0.
        softmax = safe_softmax if self.has_mask else F.softmax
        return softmax(scores, -1, dtype=torch.float32 if scores.dtype in LOW else None)

    def _drop_and_cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x * 0.0 if self.p == 1 else drop_by_index(x, self.key, self.cells, self.p)
        return _expand_to_matrices(x.to(dtype), x.shape[:-2])


@compose(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention; with dropout, by way of explicit attention weights."""
    options = Options(is_causal, scale, enable_gqa, dropout_p)
    tensors = query, key, value, attn_mask
    if dropout_p == 0:
        return call_rule(attention, *tensors, *options)
    check_probability(dropout_p)
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: pass attn_mask or is_causal, not both")
    draws = next_draw()
    if any(hasattr(x, "placement") for x in tensors):
        return call_rule(dropping_attention, *tensors, *options)
    assert draws is not None
    batch = query.shape[:-2]
    if not enable_gqa:
        batch = torch.broadcast_shapes(batch, key.shape[:-2], value.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    cells = Cells(Box.whole(shape), shape)
    hidden = _future_keys(cells, query.device) if is_causal else None
    draw = key_of(draws, query.device)
    return _attend(*tensors, hidden, options, cells, draw)
