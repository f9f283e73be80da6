"""Several tensors to one along a dim, and back: ``cat``, ``stack``, ``split``, ``unbind``."""

from __future__ import annotations

from gpudist.sbp.attributes import Sbp, broadcast, partial_sum, split
from gpudist.sbp.registry import Call, Signature, forms, register


def _all_alike(call: Call, one: Sbp, result: Sbp) -> Signature:
    return Signature((one,) * len(call.tensors), (result,) * len(call.outputs))


@register(*forms("cat", "concat", "concatenate"), any_cuts=True)
def cat(call: Call, parts: int) -> list[Signature]:
    """All tensors split along another dim than that of the joint, or all terms.

    A tensor of shape ``(0,)`` is joined to any, as torch has it; it stays a copy.
    """
    dims = call.outputs[0].dims
    joint = call.get(1, "dim", 0) % dims
    found = [_all_alike(call, split(d), split(d)) for d in range(dims) if d != joint]
    empty = [shape == (0,) and dims > 1 for shape in call.shapes]
    if any(empty):
        found = [
            Signature(
                tuple(broadcast if e else s for s, e in zip(one.inputs, empty, strict=True)),
                one.outputs,
            )
            for one in found
        ]
    return [*found, _all_alike(call, partial_sum, partial_sum)]


@register(*forms("stack"), any_cuts=True)
def stack(call: Call, parts: int) -> list[Signature]:
    """As ``cat``; dims from the new one on move up."""
    dims = call.outputs[0].dims
    new = call.get(1, "dim", 0) % dims
    found = [_all_alike(call, split(d), split(d + (d >= new))) for d in range(dims - 1)]
    return [*found, _all_alike(call, partial_sum, partial_sum)]


@register(*forms("split", "split_with_sizes", "chunk", "tensor_split"), view=True, any_cuts=True)
def cut(call: Call, parts: int) -> list[Signature]:
    """Splits along other dims than that of the cuts."""
    dims = call.tensors[0].dims
    along = call.get(2, "dim", 0) % dims
    found = [_all_alike(call, split(d), split(d)) for d in range(dims) if d != along]
    return [*found, _all_alike(call, partial_sum, partial_sum)]


@register(*forms("unbind"), view=True, any_cuts=True)
def unbind(call: Call, parts: int) -> list[Signature]:
    """As ``split``; dims after that of the cuts move down."""
    dims = call.tensors[0].dims
    along = call.get(1, "dim", 0) % dims
    found = [_all_alike(call, split(d), split(d - (d > along))) for d in range(dims) if d != along]
    return [*found, _all_alike(call, partial_sum, partial_sum)]
