"""Join tensors along a dim, or cut a tensor: ``cat``, ``stack``, ``split``, ``unbind``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.sbp.call import Call, Function, Slot, new_as_in, on_meta
from gpudist.sbp.registry import AxisPart, SbpSignature, forms, register
from gpudist.sbp.signatures.fetching import concat_signature


def _all_alike(call: Call, attribute: Sbp, result: Sbp) -> SbpSignature:
    return SbpSignature((attribute,) * len(call.tensors), (result,) * len(call.outputs))


@register(*forms("cat", "concat", "concatenate"), any_cuts=True)
def cat(call: Call, parts: int) -> list[SbpSignature]:
    """Split all tensors along the same dim; linear in all tensors together.

    As in torch, a tensor of shape ``(0,)`` may be joined with any other; it remains a copy.
    """
    dims = call.outputs[0].dims
    joint = call.get(1, "dim", 0) % dims
    signatures = [_all_alike(call, split(d), split(d)) for d in range(dims) if d != joint]
    empty = [shape == (0,) and dims > 1 for shape in call.shapes]
    if any(empty):
        signatures = [
            SbpSignature(
                tuple(broadcast if e else s for s, e in zip(signature.inputs, empty, strict=True)),
                signature.outputs,
            )
            for signature in signatures
        ]
    else:
        signatures.append(concat_signature(joint, len(call.tensors)))
    return [*signatures, _all_alike(call, partial_sum, partial_sum)]


def _cat_of_shapes(function: Function, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    shapes = {(*x.shape[:dim], *x.shape[dim:][1:]) for x in tensors}
    dtypes = {x.dtype for x in tensors}
    if len(shapes) > 1 or len(dtypes) > 1 or not 0 <= dim < tensors[0].dim():
        return function(tensors, dim)
    shape = [*tensors[0].shape]
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return new_as_in(tensors[0], shape)


for _function in forms("cat", "concat", "concatenate"):
    on_meta[_function] = partial(_cat_of_shapes, _function)


@register(*forms("stack"), any_cuts=True)
def stack(call: Call, parts: int) -> list[SbpSignature]:
    """Split like ``cat``; dims after the new one move up by one."""
    dims = call.outputs[0].dims
    new = call.get(1, "dim", 0) % dims
    signatures = [_all_alike(call, split(d), split(d + (d >= new))) for d in range(dims - 1)]
    return [*signatures, _all_alike(call, partial_sum, partial_sum)]


@register(
    *forms("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split"),
    any_cuts=True,
)
def cut_pieces(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; along the cut dim, a worker holds its own cells of each piece."""
    dims = call.tensors[0].dims
    along = call.get(2, "dim", 0) % dims
    if len(call.tensors) > 1:
        raise NotImplementedError(
            "tensor_split of a global tensor: indices_or_sections is a tensor; pass numbers"
        )
    lengths = tuple(spec.shape[along] for spec in call.outputs)
    signatures = [_all_alike(call, split(d), split(d)) for d in range(dims) if d != along]
    signatures.append(_in_pieces(along, lengths, parts))
    return [*signatures, _all_alike(call, partial_sum, partial_sum)]


def _in_pieces(
    along: int, lengths: Sequence[int], parts: int, sizes: tuple[int, ...] | None = None
) -> SbpSignature:
    extent = sum(lengths)
    ends = [
        (stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True)
    ]

    def lengths_of(part: AxisPart) -> list[int]:
        first, last = part.cells(extent)
        return [max(0, min(stop, last) - max(start, first)) for start, stop in ends]

    def localize(call: Call, part: AxisPart) -> Call:
        pieces = lengths_of(part)
        if "unsafe" in call.function.__name__:
            args = Slot(0), pieces, along
            return replace(call, function=torch.unsafe_split_with_sizes, args=args, kwargs={})
        # Unlike a result of torch.split, one of tensor_split may be changed in place.
        args = Slot(0), [*accumulate(pieces[:-1])], along
        return replace(call, function=torch.tensor_split, args=args, kwargs={})

    by_worker = [lengths_of(AxisPart(parts, i, sizes)) for i in range(parts)]
    outputs = tuple(split(along, sizes_of_piece) for sizes_of_piece in zip(*by_worker, strict=True))
    again = partial(_in_pieces, along, lengths, parts)
    return SbpSignature((split(along, sizes),), outputs, localize, recut=again)


@register(*forms("unbind"), any_cuts=True)
def unbind(call: Call, parts: int) -> list[SbpSignature]:
    """Split like ``split``; dims after the removed one move down by one."""
    dims = call.tensors[0].dims
    along = call.get(1, "dim", 0) % dims
    signatures = [
        _all_alike(call, split(d), split(d - (d > along))) for d in range(dims) if d != along
    ]
    return [*signatures, _all_alike(call, partial_sum, partial_sum)]
