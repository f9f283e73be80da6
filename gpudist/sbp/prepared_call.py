"""An operator prepared for tensors of given layouts: derived, bound, its boxings planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from gpudist.cache import cache_of
from gpudist.checks.storage import dtype_remedy, is_about_dtypes
from gpudist.errors import GpudistError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.layout import Layout
from gpudist.nn.autocast import in_dtypes_of_torch, is_wide
from gpudist.sbp.boxing import movement_of
from gpudist.sbp.call import Call, Compute, Spec, key_of, on_parts
from gpudist.sbp.derive import Derivation, derive
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import Rule, Where, name_of
from gpudist.sbp.scope import PlanRow, Scope, current_scope, place_of_call
from gpudist.sbp.signatures.across import in_one_order
from gpudist.sbp.trees import tensors_in

# Functions of a tensor's shape, whose results are constants.
_WITHOUT_GRADIENT = {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like}


@dataclass
class PreparedCall:
    """An operator prepared for tensors of given layouts.

    Attributes:
        derivation: how to execute the operator.
        movements: movements of the boxed inputs, by slot.
        placement: placement of the tensors.
        compute: maps local tensors to local results; ``None`` if it depends on the arguments of
            each call.
    """

    derivation: Derivation
    movements: dict[int, Movement]
    placement: Placement
    compute: Compute | None

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        index = self.placement.index or ()
        return [layout.box(index).shape for layout in self.derivation.outputs]

    def __call__(self, call: Call, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the local results of ``call``; its floats may differ from the prepared ones."""
        derivation = self.derivation
        if not self.placement.active:
            inputs = () if call.function in _WITHOUT_GRADIENT else local
            return [placeholder(local[0], inputs, spec) for spec in derivation.results]
        compute = self.compute or derivation.with_arguments(call).local
        results = tensors_in(compute(local))
        ends = zip(results, derivation.outputs, self._shapes, strict=bool(derivation.outputs))
        for y, layout, expected in ends:
            if y.shape != expected:
                raise RuntimeError(
                    f"{name_of(call.function)}: the block of {layout.sbp} has shape "
                    f"{list(y.shape)}, but its signature implies {list(expected)}; correct the "
                    "rule of this function"
                )
        return results


def prepare(
    rule: Rule, call: Call, layouts: tuple[Layout, ...], placement: Placement, held: int | None
) -> PreparedCall:
    remembered: Any = placement.partition.wire.remembered
    calls = cache_of(remembered, "derivations", 4096)
    try:
        arguments = key_of((call.args, call.kwargs), rule.any_float)
        low = call.autocast and (call.autocast, torch.get_autocast_dtype(call.autocast))
        wide = torch.get_default_dtype()
        key = (call.function, arguments, call.tensors, layouts, rule, low, wide, held)
    except TypeError:
        return _prepare(rule, call, layouts, placement, held)
    return calls.get_or_make(key, lambda: _prepare(rule, call, layouts, placement, held, key))


def _prepare(
    rule: Rule,
    call: Call,
    layouts: tuple[Layout, ...],
    placement: Placement,
    held: int | None,
    key: object = None,
) -> PreparedCall:
    try:
        derivation = derive(rule, call, layouts, placement.index, key, held)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        name_call(error, call)
        raise
    world = placement.partition.world
    ends = zip(call.tensors, layouts, derivation.inputs, strict=True)
    movements = {
        i: movement
        for i, (spec, source, target) in enumerate(ends)
        if (movement := movement_of(spec.dtype, source, target, world)) is not None
    }
    local_call = derivation.local
    P = placement.partition
    if P.size > 1 and P.device.type == "cpu" and local_call.function in on_parts:
        local_call = replace(local_call, function=on_parts[local_call.function])
    compute, whole = None if rule.any_float else local_call.as_function, call
    if derivation.bind is not None and placement.active:
        local, dtypes = derivation.local, [spec.dtype for spec in derivation.results]
        if call.autocast is not None and is_wide(dtypes):
            local, whole = local.in_single_precision, call.in_single_precision
        compute = derivation.bind(local, _where(whole, derivation, placement))
        if call.autocast is not None:
            compute = in_dtypes_of_torch(compute, call.autocast, dtypes)
        if any(layout.has_empty_blocks for layout in (*derivation.inputs, *derivation.outputs)):
            compute = in_one_order(compute)
    return PreparedCall(derivation, movements, placement, compute)


def name_call(error: Exception, call: Call) -> None:
    """Add layer, function and shapes to the text of an error that torch raised for a call."""
    is_torchs = not isinstance(error, GpudistError | NotImplementedError)
    if not is_torchs or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    scope = current_scope()
    path = place_of_call(scope)[0] if scope is not None else ""
    where = f"{path!r}, {name_of(call.function)}" if path else name_of(call.function)
    dtypes = {str(spec.dtype) for spec in call.tensors}
    tensors_text = " and ".join(
        f"{list(spec.shape)}{f' of {spec.dtype}' if len(dtypes) > 1 else ''}"
        for spec in call.tensors
    )
    text = f"{where} of tensors of shapes {tensors_text}: {error.args[0]}"
    remedy = dtype_remedy([spec.dtype for spec in call.tensors]) if is_about_dtypes(error) else ""
    error.args = (f"{text}; {remedy}" if remedy else text,)


def box_inputs(
    movements: dict[int, Movement], local: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Box all inputs as the operator requires, with all movements in flight together."""
    if not movements:
        return local
    moved = move(list(movements.values()), [local[i] for i in movements])
    boxed = list(local)
    for i, x in zip(movements, moved, strict=True):
        boxed[i] = x
    return boxed


def _where(call: Call, derivation: Derivation, placement: Placement) -> Where:
    assert placement.index is not None
    return Where(
        placement.along(derivation.bind_axes),
        call,
        tuple(layout.box(placement.index) for layout in derivation.inputs),
        tuple(layout.box(placement.index) for layout in derivation.outputs),
        tuple(layout.sbp for layout in derivation.inputs),
    )


def placeholder(like: torch.Tensor, inputs: Sequence[torch.Tensor], spec: Spec) -> torch.Tensor:
    """Return an empty output with the graph of its inputs, for ranks outside the placement."""
    output = like.new_empty(0, dtype=spec.dtype)
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return output
    for x in inputs:
        if x.requires_grad and torch.is_grad_enabled():
            output = output + x.reshape(-1)[:0].to(spec.dtype)
    return output


def plan_row(
    scope: Scope, call: Call, layouts: Sequence[Layout], prepared: PreparedCall, sent_bytes: int
) -> PlanRow:
    """Return the row of a call in the plan of its network."""
    derivation = prepared.derivation
    every = [layout.count("broadcast") for layout in (*derivation.inputs, *derivation.outputs)]
    workers = prod(prepared.placement.shape)
    ends = zip(layouts, derivation.inputs, strict=True)
    return PlanRow(
        place_of_call(scope)[0],
        name_of(call.function),
        ", ".join(str(a.sbp) if a == b else f"{a.sbp} as {b.sbp}" for a, b in ends),
        ", ".join(str(layout.sbp) for layout in derivation.outputs),
        sum(prod(layout.shape) for layout in derivation.outputs),
        sent_bytes,
        False,
        workers > 1 and all(count == workers for count in every),
    )
