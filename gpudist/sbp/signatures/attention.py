"""Attention, split in samples, heads and queries, or in the sequences of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.boxes import Box
from gpudist.geometry.layout import Layout, Sbp, broadcast, partial_sum, split
from gpudist.nn.autocast import product_dtype
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.nn.random.drop import drop_by_index
from gpudist.sbp.boxing import movement_of
from gpudist.sbp.registry import Call, Compute, SbpSignature, Where, compose, register
from gpudist.sbp.signatures.across import axes_that_split
from gpudist.sbp.signatures.along_axis import on_cells, without_cells
from gpudist.sbp.signatures.channel_norms import call_rule
from gpudist.sbp.signatures.dropout import (
    check_probability,
    next_draw,
    seed_and_number,
    seed_and_number_of,
)
from gpudist.sbp.signatures.elementwise import align_attribute

_transforms_active: Any = torch._C._are_functorch_transforms_active  # pyright: ignore
attend: Any = F.scaled_dot_product_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Compute the attention of plain tensors, without dropout."""
    if query.is_meta and type(query) is Tensor and query.dim() == 4:
        dtype = product_dtype(query)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        return _fused(query, key, value, mask, is_causal, scale)
    return attend(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: Any
) -> Tensor:
    """Compute attention without data by a kernel that keeps no weights, as devices have.

    Torch has none for ``meta``, whose weights of all pairs would be counted as memory.
    """
    if key.shape[1] != query.shape[1]:
        key, value = (_for_groups(x, query.shape[1] // x.shape[1]) for x in (key, value))
    bias = None
    if mask is not None:
        bias = mask if mask.is_floating_point() else mask.to(query.dtype)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]


@register(attention, any_cuts=True)
def attention_of_blocks(call: Call, parts: int) -> list[SbpSignature]:
    """Split batch dims, heads, queries, or the last dim of the values, in which it is linear.

    If queries and keys are split along their sequences, they are repartitioned to split heads, and
    the result back, where every worker gets heads and that moves no more bytes than gathering the
    keys and values.
    """
    q, k, v = call.shapes[:3]
    result = call.outputs[0].shape
    rows, dims = len(result) - 2, len(result)
    masks = call.shapes[3:]
    scores = (*result[:-1], k[-2])
    found: list[SbpSignature] = []
    for d in range(rows):
        ones = [align_attribute(shape[:-2], d, result[:-2]) for shape in (q, k, v)]
        if call.args[6] and d == rows - 1 and k[-3] not in (1, q[-3]):
            # Groups of query heads share keys: a block needs whole groups.
            if k[-3] % parts:
                continue
            ones = [split(len(shape) - 3) for shape in (q, k, v)]
            found.append(_attending(call, ones, masks, d, scores, split(d), keeps_cut=True))
            continue
        found.append(_attending(call, ones, masks, d, scores, split(d)))
    queries: list[Sbp] = [split(len(q) - 2), broadcast, broadcast]
    found.append(_attending(call, queries, masks, rows, scores, split(rows)))
    if not masks and _swaps(call, parts):
        sequences = tuple(split(len(shape) - 2) for shape in (q, k, v))
        found.append(SbpSignature(sequences, (split(rows),), bind=_bind, nests=False))
    cells: list[Sbp] = [broadcast, broadcast, split(len(v) - 1)]
    whole = tuple(broadcast for _ in masks)
    values = SbpSignature((*cells, *whole), (split(dims - 1),), bind=_bind, only_unboxed=True)
    terms: list[Sbp] = [broadcast, broadcast, partial_sum]
    # Every worker computes all weights.
    found += [values, replace(values, inputs=(*terms, *whole), outputs=(partial_sum,))]
    return found


# An all-to-all moves ``1 - 1 / parts`` of each tensor, the result included. A gather moves
# ``parts - 1`` times the keys and values.
def _swaps(call: Call, parts: int) -> bool:
    q, k, v = call.shapes[:3]
    if not len(q) == len(k) == len(v) > 2 or q[:-3] != k[:-3]:
        return False
    heads = k[-3] % parts == 0 if call.args[6] else q[-3] == k[-3] == v[-3]
    cells = [prod(shape) for shape in (q, k, v, call.outputs[0].shape)]
    return heads and k[-3] >= parts and sum(cells) <= parts * (cells[1] + cells[2])


def _swapped(call: Call, where: Where, axes: Sequence[int]) -> Compute:
    """Bind an all-to-all from blocks of sequences to whole sequences of some heads, and back."""
    P = where.P.along(axes)
    specs = *where.call.tensors, where.call.outputs[0]
    ends: list[tuple[Layout, Layout]] = []
    for slot, (spec, box) in enumerate(zip(specs, (*where.inputs, *where.outputs), strict=True)):
        rows, sizes = spec.dims - 2, where.sbps[slot % 3]
        shape = (*box.shape[:rows], spec.shape[rows], *box.shape[rows + 1 :])
        sequence = [split(rows, sizes[a].sizes) if a in axes else broadcast for a in range(P.dim)]
        heads = [split(rows - 1) if a in axes else broadcast for a in range(P.dim)]
        source = Layout(tuple(P.ranks), P.shape, tuple(sequence), shape)
        ends.append((source, source.with_sbp(tuple(heads))))
    assert P.index is not None
    result = ends[3][1].box(P.index).shape

    def movement(x: Tensor, source: Layout, target: Layout) -> Movement:
        found = movement_of(x.dtype, source, target, P.world)
        assert found is not None
        return found

    def compute(tensors: Sequence[Tensor]) -> Any:
        to_heads = [movement(x, *pair) for x, pair in zip(tensors, ends[:3], strict=True)]
        moved = move(to_heads, tensors)
        has_cells = all([x.numel() for x in moved])
        y = call(moved) if has_cells else without_cells(result, moved[0].dtype, moved)
        return move((movement(y, *ends[3][::-1]),), (y.contiguous(),))[0]

    return compute


def _attending(
    call: Call,
    ones: Sequence[Sbp],
    masks: Sequence[tuple[int, ...]],
    d: int,
    scores: tuple[int, ...],
    result: Sbp,
    keeps_cut: bool = False,
) -> SbpSignature:
    inputs = (*ones, *(align_attribute(shape, d, scores) for shape in masks))
    recut: Any = (lambda sizes: None) if keeps_cut else None
    return SbpSignature(inputs, (result,), recut=recut, bind=_bind)


def _bind(call: Call, where: Where) -> Compute:
    """Bind a block of queries; causal queries attend to keys up to their global position."""
    rows = where.call.tensors[1].dims - 2
    axes = axes_that_split(where, 1, (rows,))
    if axes:
        return _swapped(call, where, axes)
    cells = where.inputs[0]
    start, stop = cells.start[-2], cells.stop[-2]
    if not call.args[4] or stop - start == where.call.shapes[0][-2]:
        return on_cells(call, where)
    keys = min(stop, call.shapes[1][-2])
    mask = torch.ones(stop - start, keys, dtype=torch.bool, device=where.P.device).tril(start)
    shape = where.outputs[0].shape

    def compute(tensors: Sequence[Tensor]) -> Any:
        q, k, v = tensors
        if not q.numel():
            return without_cells(shape, q.dtype, (q, k, v))
        k, v = k.narrow(-2, 0, keys), v.narrow(-2, 0, keys)
        return attention(q, k, v, mask, False, *call.args[5:])

    return compute


def dropping_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    p: float,
) -> Tensor:
    """Placeholder for ``_attend_dropping``, which each worker computes on its block."""
    return attention(query, key, value, mask, is_causal, scale, enable_gqa)


@register(dropping_attention, replicable=False, any_cuts=True, draws_anew=True)
def dropping_attention_of_blocks(call: Call, parts: int) -> list[SbpSignature]:
    """Split like attention without dropout, but for whole sequences of some heads."""
    found = [one for one in attention_of_blocks(call, parts) if one.nests]
    copies = SbpSignature((broadcast,) * len(call.tensors), (broadcast,))
    return [replace(one, run=_attend_dropping, bind=None) for one in (*found, copies)]


def _attend_dropping(call: Call, tensors: Sequence[Tensor], where: Where) -> Tensor:
    box = where.outputs[0]
    if not tensors[0].numel():
        return without_cells(box.shape, tensors[0].dtype, tensors)
    keys = where.call.shapes[1][-2]
    shape = (*where.call.outputs[0].shape[:-1], keys)
    cells = Box((*box.start[:-1], 0), (*box.stop[:-1], keys))
    q, k, v, *masks = tensors
    is_causal, scale, enable_gqa, p = call.args[4:]
    given = q, k, v, masks[0] if masks else None, is_causal, scale, enable_gqa, p
    return _dropping(*given, cells, shape, *seed_and_number(where.P, q.device))


def _dropping(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    p: float,
    cells: Box,
    shape: tuple[int, ...],
    seed: Tensor | int,
    number: Tensor | int,
) -> Tensor:
    """Compute the attention of a block; its weights are ``cells`` of all weights, of ``shape``.

    On a device, backward computes the weights again, as torch's kernels do, and draws again what
    is dropped: weights of all pairs of a long sequence would be the largest tensors of a network.
    """
    if isinstance(number, Tensor):
        number = number.clone()  # may change before backward
    if is_causal:
        ones = torch.ones(cells.shape[-2:], dtype=torch.bool, device=query.device)
        mask = ones.tril_(cells.start[-2])

    def compute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if enable_gqa:
            k, v = (_for_groups(x, q.shape[-3] // x.shape[-3]) for x in (k, v))
        weights = attention_weights(q, k, mask, scale).expand(cells.shape)
        kept = weights * 0.0 if p == 1 else drop_by_index(weights, seed, number, cells, shape, p)
        return kept @ v

    given = query, key, value, mask
    # In a transform, torch computes nothing again in backward.
    if suits_cpu(query) or not torch.is_grad_enabled() or _in_transform(given):
        return compute(*given)
    found: Any = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
    return found


def _in_transform(tensors: Sequence[Tensor | None]) -> bool:
    duals = (forward_ad.unpack_dual(x) for x in tensors if x is not None)
    return _transforms_active() or any(dual.tangent is not None for dual in duals)


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
    given = (query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if dropout_p == 0:
        return call_rule(attention, *given)
    check_probability(dropout_p)
    draws = next_draw()
    if any(hasattr(x, "placement") for x in (query, key, value, attn_mask)):
        return call_rule(dropping_attention, *given, dropout_p)
    assert draws is not None
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    if enable_gqa:
        batch = query.shape[:-2]
    shape = (*batch, query.shape[-2], key.shape[-2])
    seeds = seed_and_number_of(draws, query.device)
    return _dropping(*given, dropout_p, Box.whole(shape), shape, *seeds)


def _for_groups(x: Tensor, groups: int) -> Tensor:
    repeated = x.unsqueeze(-3).expand(*x.shape[:-2], groups, *x.shape[-2:])
    return repeated.flatten(-4, -3)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Return the attention weight of each key for each query."""
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    return F.softmax(scores, -1)


@compose(F.multi_head_attention_forward)
def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute multi-head attention with a separate dim for heads, so that other splits remain."""
    if static_k is not None or static_v is not None:
        raise NotImplementedError(
            "multi_head_attention_forward of global tensors does not support static_k and "
            "static_v; leave them out"
        )
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    is_batched = query.dim() == 3
    if not is_batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = None
    if use_separate_proj_weight:
        weights = q_proj_weight, k_proj_weight, v_proj_weight
    q, k, v = _projected((query, key, value), in_proj_weight, weights, in_proj_bias)
    if bias_k is not None and bias_v is not None:
        k, v = (_with_row(x, row.expand(1, *x.shape[1:])) for x, row in ((k, bias_k), (v, bias_v)))
    if add_zero_attn:
        k, v = (_with_row(x, x.new_zeros((1, *x.shape[1:]))) for x in (k, v))
    more = k.shape[0] - key.shape[0]
    if more:
        attn_mask = None if attn_mask is None else F.pad(attn_mask, (0, more))
        key_padding_mask = None if key_padding_mask is None else F.pad(key_padding_mask, (0, more))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    mask = _mask(attn_mask, key_padding_mask, query, num_heads)
    dropout_p = dropout_p if training else 0.0
    shares = None
    if need_weights:
        shares = attention_weights(q, k, mask)
        shares = F.dropout(shares, dropout_p) if dropout_p > 0 else shares
        found = shares @ v
        shares = shares.mean(1) if average_attn_weights else shares
    else:
        found = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
    found = F.linear(found.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    if not is_batched:
        found, shares = found.squeeze(1), None if shares is None else shares.squeeze(0)
    return found, shares


def _projected(
    given: tuple[Tensor, Tensor, Tensor],
    packed: Tensor | None,
    weights: Any,
    bias: Tensor | None,
) -> Sequence[Tensor]:
    """Project queries, keys and values."""
    query, key, value = given
    if weights is None:
        assert packed is not None
        if query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, -1)
        weights = packed.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(given, weights, biases, strict=True)]


def _with_row(x: Tensor, row: Tensor) -> Tensor:
    return torch.cat([x, row])


def _mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, heads: int) -> Tensor | None:
    """Return the combined mask that is added to the scores ``[samples, heads, queries, keys]``."""
    if mask is not None:
        mask = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
        mask = _added(mask, query)
    if padding is not None:
        hidden = _added(padding, query).unsqueeze(1).unsqueeze(1)
        mask = hidden if mask is None else mask + hidden
    return mask


def _added(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)
