"""Attention, split in samples, heads and queries, or in the sequences of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.nn.attention.head_exchange import attend_by_heads
from gpudist.nn.autocast import product_dtype
from gpudist.sbp.call import Call, Compute
from gpudist.sbp.registry import SbpSignature, Where, register
from gpudist.sbp.signatures.across import axes_that_split
from gpudist.sbp.signatures.along_axis import on_cells, without_cells
from gpudist.sbp.signatures.elementwise import align_attribute

attend: Any = F.scaled_dot_product_attention


class Options(NamedTuple):
    """Arguments of attention that are not tensors; see torch's function."""

    is_causal: bool
    scale: float | None
    enable_gqa: bool
    dropout_p: float = 0.0

    @staticmethod
    def of(call: Call) -> Options:
        return Options(*call.args[4:])


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> Tensor:
    """Compute the attention of plain tensors, without dropout."""
    is_causal, scale, enable_gqa, _ = Options(*options)
    if query.is_meta and type(query) is Tensor and query.dim() == 4:
        dtype = product_dtype(query)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        return _call_fused_kernel(query, key, value, mask, is_causal, scale)
    return attend(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _call_fused_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: Any
) -> Tensor:
    """Compute attention without data by a kernel that keeps no weights, as devices have.

    Torch has none for ``meta``, whose weights of all pairs would be counted as memory.
    """
    if key.shape[1] != query.shape[1]:
        key, value = (repeat_heads(x, query.shape[1] // x.shape[1]) for x in (key, value))
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
    signatures: list[SbpSignature] = []
    for d in range(rows):
        factors = [align_attribute(shape[:-2], d, result[:-2]) for shape in (q, k, v)]
        if Options.of(call).enable_gqa and d == rows - 1 and k[-3] not in (1, q[-3]):
            # Groups of query heads share keys: a block needs whole groups.
            if k[-3] % parts:
                continue
            factors = [split(len(shape) - 3) for shape in (q, k, v)]
            signatures.append(
                _attention_signature(call, factors, masks, d, scores, split(d), keeps_cut=True)
            )
            continue
        signatures.append(_attention_signature(call, factors, masks, d, scores, split(d)))
    queries: list[Sbp] = [split(len(q) - 2), broadcast, broadcast]
    signatures.append(_attention_signature(call, queries, masks, rows, scores, split(rows)))
    if not masks and _swaps(call, parts):
        sequences = tuple(split(len(shape) - 2) for shape in (q, k, v))
        signatures.append(SbpSignature(sequences, (split(rows),), bind=_bind, nests=False))
    cells: list[Sbp] = [broadcast, broadcast, split(len(v) - 1)]
    whole = tuple(broadcast for _ in masks)
    values = SbpSignature((*cells, *whole), (split(dims - 1),), bind=_bind, only_unboxed=True)
    terms: list[Sbp] = [broadcast, broadcast, partial_sum]
    # Every worker computes all weights.
    signatures += [values, replace(values, inputs=(*terms, *whole), outputs=(partial_sum,))]
    return signatures


# An all-to-all moves ``1 - 1 / parts`` of each tensor, the result included. A gather moves
# ``parts - 1`` times the keys and values.
def _swaps(call: Call, parts: int) -> bool:
    q, k, v = call.shapes[:3]
    if not len(q) == len(k) == len(v) > 2 or q[:-3] != k[:-3]:
        return False
    heads = k[-3] % parts == 0 if Options.of(call).enable_gqa else q[-3] == k[-3] == v[-3]
    cells = [prod(shape) for shape in (q, k, v, call.outputs[0].shape)]
    return heads and k[-3] >= parts and sum(cells) <= parts * (cells[1] + cells[2])


def _bind_head_exchange(call: Call, where: Where, axis: int) -> Compute:
    """Bind an all-to-all from blocks of sequences to whole sequences of some heads, and back."""
    line, blocks, shapes = where.P.along([axis]), where.inputs, where.call.shapes
    queries, keys = (
        where.sbps[slot][axis].blocks(shapes[slot][-2], line.size) for slot in range(2)
    )
    heads, compute = [blocks[slot].shape[-3] for slot in range(2)], call.as_function

    def attend(*moved: Tensor) -> Tensor:
        if all([x.numel() for x in moved]):
            return compute(moved)
        shape = (*moved[0].shape[:-1], moved[2].shape[-1])
        return without_cells(shape, moved[0].dtype, moved)

    return lambda tensors: attend_by_heads(
        line, (queries, keys), heads[0] // heads[1], tensors, attend
    )


def _attention_signature(
    call: Call,
    factors: Sequence[Sbp],
    masks: Sequence[tuple[int, ...]],
    d: int,
    scores: tuple[int, ...],
    result: Sbp,
    keeps_cut: bool = False,
) -> SbpSignature:
    inputs = (*factors, *(align_attribute(shape, d, scores) for shape in masks))
    recut: Any = (lambda sizes: None) if keeps_cut else None
    return SbpSignature(inputs, (result,), recut=recut, bind=_bind)


def _bind(call: Call, where: Where) -> Compute:
    """Bind a block of queries; causal queries attend to keys up to their global position."""
    rows = where.call.tensors[1].dims - 2
    axes = axes_that_split(where, 1, (rows,))
    if axes:
        return _bind_head_exchange(call, where, *axes)
    cells = where.inputs[0]
    start, stop = cells.start[-2], cells.stop[-2]
    options = Options.of(call)
    if not options.is_causal or stop - start == where.call.shapes[0][-2]:
        return on_cells(call, where)
    keys = min(stop, call.shapes[1][-2])
    mask = torch.ones(stop - start, keys, dtype=torch.bool, device=where.P.device).tril(start)
    shape = where.outputs[0].shape

    def compute(tensors: Sequence[Tensor]) -> Any:
        q, k, v = tensors
        if not q.numel():
            return without_cells(shape, q.dtype, (q, k, v))
        k, v = k.narrow(-2, 0, keys), v.narrow(-2, 0, keys)
        return attention(q, k, v, mask, *options._replace(is_causal=False))

    return compute


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Repeat each head of keys or values for a group of query heads."""
    repeated = x.unsqueeze(-3).expand(*x.shape[:-2], groups, *x.shape[-2:])
    return repeated.flatten(-4, -3)
