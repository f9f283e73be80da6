"""Signatures that are legal along one axis, and the calls that the blocks of that axis make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpudist.geometry.layout import NdSbp, Sbp, broadcast
from gpudist.sbp.call import Call, Spec, key_of
from gpudist.sbp.registry import AxisPart, Rule, SbpSignature

Views = tuple[Call, ...]
# Sizes of the blocks along one axis, for each input.
Cuts = frozenset[tuple[int, ...]]
_NO_CUTS: Cuts = frozenset()


def legal_signatures(
    rule: Rule,
    views: Views,
    parts: int,
    in_place: NdSbp | None = None,
    cuts: Cuts = _NO_CUTS,
    outer: Sequence[SbpSignature] = (),
) -> list[SbpSignature]:
    """Return the signatures of one axis that are legal for all of its calls.

    Args:
        rule: rule of the operator.
        views: calls on this axis, one for each distinct block.
        parts: number of workers along the axis.
        in_place: only attributes allowed for inputs[0] and outputs[0], if the rule is in place.
        cuts: explicit sizes of blocks that inputs have.
        outer: signatures of the outer axes.
    """
    signatures: list[SbpSignature] = []
    others = [_keys(_all(rule, view, parts, cuts)) for view in views[1:]]
    for signature in _all(rule, views[0], parts, cuts):
        key = (signature.inputs, signature.outputs)
        fixed = in_place is None or (signature.inputs[0], signature.outputs[0]) == in_place
        if fixed and _may_nest(signature, outer) and all(key in keys for keys in others):
            signatures.append(signature)
    return signatures


def _may_nest(signature: SbpSignature, outer: Sequence[SbpSignature]) -> bool:
    cut = _split_dims(signature)
    return not any(
        cut & _split_dims(other) and not (signature.nests and other.nests) for other in outer
    )


def _split_dims(signature: SbpSignature) -> set[tuple[int, int]]:
    return {
        (slot, attribute.dim)
        for slot, attribute in enumerate(signature.inputs)
        if attribute.is_split
    }


def _all(rule: Rule, call: Call, parts: int, cuts: Cuts = _NO_CUTS) -> list[SbpSignature]:
    if cuts and rule.any_cuts:
        signatures = _all(rule, call, parts)
        return [
            *signatures,
            *(cut for signature in signatures for cut in _as_cut(signature, call, cuts)),
        ]
    if parts in call.memo:
        return call.memo[parts]
    signatures = call.memo[parts] = list(rule.derive(call, parts))
    if rule.replicable:
        # Some functions of torch raise on empty blocks.
        results = len(signatures[0].outputs) if signatures else len(call.outputs)
        copies = (broadcast,) * len(call.tensors), (broadcast,) * results
        if copies not in _keys(signatures):
            signatures.append(SbpSignature(*copies))
    return signatures


def _as_cut(signature: SbpSignature, call: Call, cuts: Cuts) -> Iterator[SbpSignature]:
    """Return the signature with explicit sizes, if they fit the dims that it splits."""
    extents = _split_extents(signature.inputs, call.tensors)
    for sizes in sorted(cuts):
        if extents != {sum(sizes)}:
            continue
        if signature.recut is not None:
            cut = signature.recut(sizes)
            if cut is not None:
                yield cut
        elif (min(sizes) or signature.takes_empty) and (
            signature.cuts or _split_extents(signature.outputs, call.outputs) <= extents
        ):
            yield signature.cut(sizes)


def _split_extents(sbp: NdSbp, tensors: Sequence[Spec]) -> set[int]:
    pairs = zip(sbp, tensors, strict=True)
    return {spec.shape[attribute.dim] for attribute, spec in pairs if attribute.is_split}


def cuts_of(attributes: Iterable[Sbp]) -> Cuts:
    return frozenset(attribute.sizes for attribute in attributes if attribute.sizes is not None)


def _keys(signatures: Sequence[SbpSignature]) -> set[tuple[NdSbp, NdSbp]]:
    return {(signature.inputs, signature.outputs) for signature in signatures}


def calls_of_blocks(rule: Rule, views: Views, signature: SbpSignature, parts: int) -> Views:
    blocks: dict[Any, Call] = {}
    for view in views:
        own_signature = signature_of_call(signature, rule, view, parts)
        is_cut = own_signature.localize is not None or cuts_of(own_signature.inputs)
        # The longest and the shortest of balanced blocks are the first and the last.
        for i in range(parts) if is_cut else sorted({0, parts - 1}):
            block = block_call(view, own_signature, AxisPart(parts, i))
            try:
                key: object = key_of((block.args, block.kwargs, block.tensors))
            except TypeError:
                key = object()
            blocks.setdefault(key, block)
    return tuple(blocks.values())


def signature_of_call(signature: SbpSignature, rule: Rule, call: Call, parts: int) -> SbpSignature:
    key = (signature.inputs, signature.outputs)
    options = _all(rule, call, parts, cuts_of(signature.inputs))
    return next(option for option in options if (option.inputs, option.outputs) == key)


def block_call(call: Call, signature: SbpSignature, part: AxisPart) -> Call:
    """Return the call that one block of an axis makes."""
    key = (signature.inputs, signature.outputs, part)
    if key in call.memo:
        return call.memo[key]
    sizes = next(
        (attribute.sizes for attribute in signature.inputs if attribute.sizes is not None), None
    )
    part = replace(part, sizes=sizes)
    local = signature.localize(call, part) if signature.localize is not None else call
    shapes: list[tuple[int, ...]] = []
    for attribute, shape in zip(signature.inputs, call.shapes, strict=True):
        extents = list(shape)
        if attribute.is_split:
            start, stop = attribute.blocks(shape[attribute.dim], part.parts).block(part.index)
            extents[attribute.dim] = stop - start
        shapes.append(tuple(extents))
    block = call.memo[key] = local.with_shapes(shapes)
    return block
