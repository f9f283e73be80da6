"""An operator on global tensors: derive, box, compute on the local blocks, wrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gpudist.autograd import move
from gpudist.errors import PartitionError
from gpudist.sbp.boxing import movement_of
from gpudist.sbp.derive import Derivation, as_call, derive, key_of
from gpudist.sbp.explain import is_explaining, say
from gpudist.sbp.layout import Layout
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import (
    Call,
    Composite,
    Rule,
    Spec,
    Where,
    filled,
    name_of,
    signatures,
    tensors_in,
)

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor


_REMEMBERED_CALLS = 4096


def dispatch(
    kind: type[GlobalTensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Carry out ``function`` by its entry of the table.

    Raises:
        NotImplementedError: it has none.
    """
    entry = signatures.get(function)
    if entry is None:
        raise NotImplementedError(
            f"{name_of(function)} has no signatures for global tensors; enter some by "
            "gpudist.sbp.registry.register, or compute on blocks: x.to_local(), then "
            "gpudist.to_global"
        )
    if kwargs.get("out") is not None:
        return _into(function, args, **kwargs)
    if isinstance(entry, Composite):
        return entry.function(*args, **kwargs)
    return _carry_out(kind, entry, function, args, kwargs)


def _into(function: Any, args: tuple[Any, ...], out: Any, **kwargs: Any) -> Any:
    """``out=``: computed apart, then copied to where ``out`` lies."""
    result = function(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.shape != out.shape:
        raise NotImplementedError(
            f"{name_of(function)}: out= of global tensors is one tensor of the result's shape"
        )
    return out.copy_(result)


def _carry_out(
    kind: type[GlobalTensor],
    rule: Rule,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    slots, named, tensors = as_call(function, args, kwargs)
    placement = _common_placement(kind, function, tensors)
    if rule.in_place and _is_copy_of_view(tensors[0]):
        raise RuntimeError(
            f"{name_of(function)}: the tensor is a copy, because the one of which it would be a "
            "view had to be boxed; what is changed in it would be missing there. Box that one "
            "before, or clone this one"
        )
    layouts = tuple(_layout(kind, placement, x) for x in tensors)
    specs = tuple(Spec(tuple(x.shape), x.dtype) for x in tensors)
    call = Call(function, slots, named, specs)
    derivation = _derived(rule, call, layouts, placement)
    if is_explaining():
        say(_explained(call, layouts, derivation))
    local = [x._local if isinstance(x, kind) else x for x in tensors]
    local = _boxed(local, layouts, derivation.inputs, placement)
    results = _computed(call, derivation, local, placement)
    if rule.in_place:
        return tensors[0]
    wrapped = [
        kind._wrap(y, placement, layout.sbp, layout.shape)
        for y, layout in zip(results, derivation.outputs, strict=True)
    ]
    is_copy = derivation.inputs != layouts or derivation.run is not None
    if rule.view and (is_copy or _is_copy_of_view(tensors[0])):
        for y in wrapped:
            vars(y)["_is_copy_of_view"] = True
    return filled(derivation.tree, wrapped)


def _is_copy_of_view(x: torch.Tensor) -> bool:
    """Whether ``x`` would share memory with another tensor, had that not been boxed."""
    return vars(x).get("_is_copy_of_view", False)


def _common_placement(
    kind: type[GlobalTensor], function: Any, tensors: Sequence[torch.Tensor]
) -> Placement:
    """The one placement of all global tensors; others must be numbers, alike on all ranks."""
    placements = [x.placement for x in tensors if isinstance(x, kind)]
    if any(other != placements[0] for other in placements[1:]):
        raise PartitionError(
            f"{name_of(function)}: the tensors lie on {placements[0]!r} and on other placements; "
            "bring them to one with to_global"
        )
    for x in tensors:
        if not isinstance(x, kind) and (x.dim() or x.requires_grad):
            raise PartitionError(
                f"{name_of(function)}: a plain tensor of shape {list(x.shape)} meets global "
                "tensors; make it one with gpudist.to_global. Only a tensor without dims, which "
                "needs no gradient and is alike on all ranks, may stay plain"
            )
    return placements[0]


def _layout(kind: type[GlobalTensor], placement: Placement, x: torch.Tensor) -> Layout:
    return x.layout if isinstance(x, kind) else placement.copies(tuple(x.shape))


def _derived(
    rule: Rule, call: Call, layouts: tuple[Layout, ...], placement: Placement
) -> Derivation:
    remembered: Any = placement.partition.wire.remembered
    found: dict[Any, Derivation] = remembered.setdefault("derivations", {})
    try:
        arguments = key_of((call.args, call.kwargs), rule.any_float)
        key = (call.function, arguments, call.tensors, layouts)
    except TypeError:
        return derive(rule, call, layouts, placement.index)
    if key not in found:
        # Arguments may be new at every call.
        if len(found) >= _REMEMBERED_CALLS:
            found.clear()
        found[key] = derive(rule, call, layouts, placement.index)
    return found[key].with_arguments(call) if rule.any_float else found[key]


def _boxed(
    local: list[torch.Tensor],
    given: Sequence[Layout],
    wanted: Sequence[Layout],
    placement: Placement,
) -> list[torch.Tensor]:
    """The inputs as the operator needs them, all boxings in flight together."""
    world = placement.partition.world
    movements = {
        i: movement
        for i, (source, target) in enumerate(zip(given, wanted, strict=True))
        if (movement := movement_of(local[i].dtype, source, target, world)) is not None
    }
    if not movements:
        return local
    moved = move(list(movements.values()), [local[i] for i in movements])
    boxed = list(local)
    for i, x in zip(movements, moved, strict=True):
        boxed[i] = x
    return boxed


def _computed(
    call: Call, derivation: Derivation, local: list[torch.Tensor], placement: Placement
) -> list[torch.Tensor]:
    if not placement.active:
        return [_placeholder(local, spec) for spec in derivation.results]
    if derivation.run is None:
        result = derivation.local(local)
    else:
        result = derivation.run(derivation.local, local, _where(call, derivation, placement))
    results = list(tensors_in(result))
    if not derivation.outputs:
        return results
    assert placement.index is not None
    for y, layout in zip(results, derivation.outputs, strict=True):
        expected = layout.box(placement.index).shape
        if tuple(y.shape) != expected:
            raise RuntimeError(
                f"{name_of(call.function)}: by its signature the block of {layout.sbp} has shape "
                f"{list(expected)}, but it is {list(y.shape)}: the signature is wrong"
            )
    return results


def _where(call: Call, derivation: Derivation, placement: Placement) -> Where:
    assert placement.index is not None
    return Where(
        placement.along(derivation.run_axes),
        call,
        tuple(layout.box(placement.index) for layout in derivation.inputs),
        tuple(layout.box(placement.index) for layout in derivation.outputs),
        tuple(layout.sbp for layout in derivation.inputs),
    )


def _placeholder(local: Sequence[torch.Tensor], spec: Spec) -> torch.Tensor:
    """The output of a rank outside the placement: no cells, but the graph of all inputs."""
    output = local[0].new_empty(0, dtype=spec.dtype)
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return output
    for x in local:
        if x.requires_grad and torch.is_grad_enabled():
            output = output + x.reshape(-1)[:0].to(spec.dtype)
    return output


def _explained(call: Call, layouts: Sequence[Layout], derivation: Derivation) -> str:
    inputs = ", ".join(
        f"{given.sbp}" if given == wanted else f"{given.sbp} boxed to {wanted.sbp}"
        for given, wanted in zip(layouts, derivation.inputs, strict=True)
    )
    outputs = ", ".join(f"{layout.sbp}" for layout in derivation.outputs)
    return f"{name_of(call.function)}: {inputs} -> {outputs}; {derivation.bytes} bytes boxed"
