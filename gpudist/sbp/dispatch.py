"""Execute an operator on global tensors: derive, box, compute on local blocks, wrap."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gpudist.cache import Cache
from gpudist.checks.storage import PLAIN
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.layout import Layout, broadcast, share_at_cuts, split
from gpudist.nn.autocast import in_dtypes_of_torch
from gpudist.sbp import views
from gpudist.sbp.arguments import bind_arguments
from gpudist.sbp.call import Call, Spec, as_call, fill_slots, key_of, share_memory
from gpudist.sbp.derive import Derivation
from gpudist.sbp.explain import is_explaining, say
from gpudist.sbp.global_spec import on_axes_of, spec_of
from gpudist.sbp.outer import OuterTensor, changes_in_place, materialize_in, outer
from gpudist.sbp.placement import Placement
from gpudist.sbp.plain import with_copies
from gpudist.sbp.prepared_call import (
    PreparedCall,
    box_inputs,
    name_call,
    placeholder,
    plan_row,
    prepare,
)
from gpudist.sbp.registry import Composite, Rule, name_of, signatures
from gpudist.sbp.remedies import remedy_of
from gpudist.sbp.scope import Scope, current_scope
from gpudist.sbp.signatures.elementwise import ELEMENTWISE
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.sbp.unknown import compute_gathered

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor


class OperatorCall(NamedTuple):
    """Record of an executed operator.

    Attributes:
        function: function of torch.
        call: its call.
        inputs: its tensors.
        prepared: its prepared execution.
        results: its results; empty if it is in place.
        aliases: for each result, the input that it is a view of in torch, or ``None``.
        is_copy: whether the results have memory of their own.
        base: place among the arguments of a cached call of the input that the results are views of.
    """

    function: Any
    call: Call
    inputs: Sequence[torch.Tensor]
    prepared: PreparedCall
    results: Sequence[GlobalTensor]
    aliases: tuple[int | None, ...] = ()
    is_copy: bool = False
    base: int | None = None


def refusal_of_transforms(where: str) -> ShapeError:
    """Return the error of a call within a transform of ``torch.func``."""
    return ShapeError(
        f"{where}: transforms of torch.func cannot trace global tensors; use torch.autograd.grad, "
        "or transform a function of plain tensors: x.full_tensor()"
    )


def dispatch(
    kind: type[GlobalTensor],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operators: list[OperatorCall | None] | None = None,
) -> Any:
    """Execute ``function`` by its entry in the table.

    Within a converted network, a function without an entry, or whose entry does not support these
    arguments, is computed on whole tensors.

    Args:
        kind: class of global tensors.
        function: function of torch.
        args: positional arguments.
        kwargs: keyword arguments.
        operators: list to which each operator is appended that a rule handles, and ``None`` if the
            entry does not support these arguments.

    Raises:
        NotImplementedError: the function has no entry.
    """
    if torch._C._are_functorch_transforms_active():  # pyright: ignore
        raise refusal_of_transforms(name_of(function))
    entry = signatures.get(function)
    scope = current_scope()
    if scope is None and entry is not None:
        copies = with_copies(kind, function, args, kwargs)
        if copies is not None:
            args, kwargs = copies
            return function(*args, **kwargs)
    args, kwargs = materialize_in(function, args, kwargs, keeps_read=scope is not None)
    if entry is None:
        if scope is not None:
            return compute_gathered(kind, scope, function, args, kwargs)
        raise NotImplementedError(
            f"{name_of(function)} has no signatures for global tensors; "
            f"{remedy_of(function, args, kwargs)}"
        )
    args, kwargs = bind_arguments(function, args, kwargs)
    if kwargs.get("out") is not None:
        return _into(function, args, **kwargs)
    if scope is not None and function in ELEMENTWISE:
        pending = _outer_of_copies(kind, function, args, kwargs)
        if pending is not None:
            return pending
    try:
        if isinstance(entry, Composite):
            return _composed(kind, entry, function, args, kwargs)
        return _carry_out(kind, entry, function, args, kwargs, operators)
    except NotImplementedError as error:
        if scope is None:
            raise
        if operators is not None:
            operators.append(None)
        return compute_gathered(kind, scope, function, args, kwargs, str(error))
    except (RuntimeError, TypeError, IndexError, ValueError):
        # Rules and torch's shapes take numbers, in place of which torch takes tensors without dims.
        others = (args[1:], kwargs)
        if operators is None or not any(_is_number(kind, x) for x in tensors_in([*others])):
            raise
        operators.append(None)  # The call is not kept: the numbers may change.
        rest, named = map_tree(others, lambda x: _value(kind, x) if _is_number(kind, x) else x)
        return dispatch(kind, function, (*args[:1], *rest), named, operators)


def _is_number(kind: type[GlobalTensor], x: Any) -> bool:
    # Of copies, whose value takes no message: an error may be that of one rank alone.
    is_known = not isinstance(x, kind) or x.is_copy_everywhere
    return isinstance(x, torch.Tensor) and not (x.dim() or x.requires_grad) and is_known


def _value(kind: type[GlobalTensor], x: torch.Tensor) -> Any:
    return (x.full_tensor() if isinstance(x, kind) else x).item()


# Dtypes that autocast gives a composite function, by its call; none if torch refuses the call.
_dtypes = Cache[Any, list[torch.dtype]](1024)


def _composed(
    kind: type[GlobalTensor],
    composite: Composite,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a composite; under autocast, in the dtypes of torch's function."""
    if not torch._C._is_any_autocast_enabled():  # pyright: ignore
        return composite.function(*args, **kwargs)
    slots, named, tensors = as_call(function, args, kwargs)
    placement = next(x.placement for x in tensors if isinstance(x, kind))
    dtypes: list[torch.dtype] = []
    if placement.autocast is not None and not changes_in_place(function, kwargs):
        specs = tuple(Spec(tuple(x.shape), x.dtype) for x in tensors)
        call = Call(function, slots, named, specs, placement.autocast)
        with suppress(TypeError):
            key = key_of((slots, named, specs)), torch.get_autocast_dtype(placement.autocast)
            dtypes = _dtypes.get_or_make(
                (function, placement.autocast, *key), lambda: _dtypes_of(call)
            )
    if not dtypes or placement.autocast is None:
        return composite.function(*args, **kwargs)

    def compute(xs: Sequence[torch.Tensor]) -> Any:
        return composite.function(*fill_slots(slots, xs), **fill_slots(named, xs))

    return in_dtypes_of_torch(compute, placement.autocast, dtypes)(tensors)


def _dtypes_of(call: Call) -> list[torch.dtype]:
    try:
        return [spec.dtype for spec in call.outputs]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return []  # The composite says what does not fit.


def _outer_of_copies(
    kind: type[GlobalTensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of copies that is to be made later, or ``None``."""
    copies = [x for x in tensors_in([args, kwargs]) if isinstance(x, kind)]
    P = copies[0].placement.partition
    # Ranks outside the placement have no copies, and decide alike.
    if P.size < P.world.size or not all(x.is_copy_everywhere for x in copies):
        return None

    def local(x: Any) -> Any:
        return x._local if isinstance(x, kind) else x

    return outer(
        kind, copies[0].placement, function, map_tree(args, local), map_tree(kwargs, local)
    )


def _into(function: Any, args: tuple[Any, ...], out: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.shape != out.shape:
        raise NotImplementedError(
            f"{name_of(function)}: out= is a global tensor of another shape than the result; pass "
            "one of the result's shape"
        )
    return out.copy_(result)


def _carry_out(
    kind: type[GlobalTensor],
    rule: Rule,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operators: list[OperatorCall | None] | None = None,
    is_clone: bool = False,
) -> Any:
    slots, named, tensors = as_call(function, args, kwargs)
    given = tensors
    scope = current_scope()
    in_place = (rule.in_place or changes_first(function, slots, named)) and not is_clone
    tensors = _on_one_placement(kind, scope, tensors, in_place)
    placement = _common_placement(kind, function, tensors)
    # A plan's layouts are kept.
    if rule.windows and scope is not None and scope.pins is None:
        tensors[0] = _cut(kind, scope, tensors)
    if in_place and scope is None and not isinstance(tensors[0], kind):
        _require_constants(function, tensors)
    if in_place != rule.in_place:
        rule = replace(rule, in_place=in_place)
    is_watched = rule.in_place and isinstance(tensors[0], kind) and views.concerns(tensors[0])
    if is_watched:
        views.require_writable(name_of(function), tensors[0])
    layouts = tuple(_layout(kind, placement, x) for x in tensors)
    specs = tuple(
        Spec(tuple(x.shape), x.dtype, spec_of(x).strides if isinstance(x, kind) else None)
        for x in tensors
    )
    call = Call(function, slots, named, specs, placement.autocast)
    held = next(
        (i for i, x in enumerate(tensors) if isinstance(x, kind) and spec_of(x).is_held), None
    )
    try:
        prepared = prepare(rule, call, layouts, placement, held)
    except ShapeError:
        if not rule.in_place or function is torch.Tensor.copy_:
            raise
        # In-place functions cannot box their first tensor, but can box a clone of it.
        arguments = fill_slots(slots, [tensors[0].clone(), *tensors[1:]])
        return tensors[0].copy_(_carry_out(kind, rule, function, arguments, kwargs, is_clone=True))
    if is_explaining():
        say(_explanation(call, layouts, prepared.derivation))
    record = scope.record if scope is not None else None
    sent = record.sent_bytes() if record is not None else 0
    movements = prepared.movements
    local = [x._local if isinstance(x, kind) else _plain(x, placement) for x in tensors]
    for i, x in enumerate(tensors):
        if isinstance(x, OuterTensor):
            local[i] = x.cells(prepared.derivation.inputs[i], placement.index)
            movements = {slot: movements[slot] for slot in movements if slot != i}
    try:
        local = box_inputs(movements, local)
        results = prepared(call, local)
    except Exception as error:
        name_call(error, call)
        raise
    if record is not None and scope is not None:
        record.add(plan_row(scope, call, layouts, prepared, record.sent_bytes() - sent))
    if rule.in_place:
        if not placement.active and isinstance(tensors[0], kind):
            # As on the other ranks, backward reaches all inputs through this tensor.
            follower = placeholder(local[0], local, specs[0])
            if follower.requires_grad:
                local[0].add_(follower.view_as(local[0]))
        if is_watched:
            views.propagate_change(tensors[0])
        if operators is not None:
            operators.append(OperatorCall(function, call, tensors, prepared, ()))
        return tensors[0]
    outputs = prepared.derivation.outputs
    # A function that replaces the operator, and one of boxed inputs, makes new memory.
    is_copy = prepared.derivation.bind is not None or prepared.derivation.inputs != layouts
    aliases = prepared.derivation.aliases
    for place, slot in enumerate(aliases):
        y = results[place]
        if slot is None:
            if any(share_memory(y, x) for x in local):
                results[place] = y.clone()
        elif not (placement.active or is_copy) and y.dtype == local[slot].dtype:
            # Work in place on a view changes the graph of its base, on every rank alike.
            results[place] = local[slot].reshape(-1)[:0]
    wrapped = [
        kind._wrap(y, placement, layout.sbp, layout.shape, spec.strides)
        for y, layout, spec in zip(results, outputs, prepared.derivation.results, strict=True)
    ]
    if scope is not None:
        for y in wrapped:
            scope.note_block(y.global_layout, y.element_size())
    for place, (slot, y) in enumerate(zip(aliases, wrapped, strict=True)):
        if slot is not None and isinstance(base := given[slot], kind):
            is_moved = is_copy or base._local is not tensors[slot]._local
            views.note(y, base, function, args, kwargs, call, is_moved, place)
    if operators is not None:
        operators.append(OperatorCall(function, call, tensors, prepared, wrapped, aliases, is_copy))
    return fill_slots(prepared.derivation.tree, wrapped)


def _on_one_placement(
    kind: type[GlobalTensor], scope: Scope | None, tensors: list[Any], in_place: bool
) -> list[Any]:
    """Convert tensors to the first one's placement, if it has the same ranks on other axes.

    The first one counts if it is changed in place; otherwise the one whose layout is held, or the
    first one that is not a copy on each rank. Numbers, which are tensors without dims, are moved;
    within a network whose plan moves tensors, all are.
    """
    global_tensors = [x for x in tensors if isinstance(x, kind)]
    first = global_tensors[0]
    is_target = in_place and first is tensors[0]
    if not is_target and any(x.placement is not first.placement for x in global_tensors):
        first = next((x for x in global_tensors if x.dim() and not x.is_copy_everywhere), first)
        first = next((x for x in global_tensors if spec_of(x).is_held), first)
    converted: list[Any] = []
    for x in tensors:
        if isinstance(x, kind) and x.placement is not first.placement:
            same = on_axes_of(x, first.placement)
            if same is None and (scope is not None or not x.dim()):
                is_alike = x.shape == first.shape
                copies = (broadcast,) * first.placement.axes
                same = x.to_global(first.placement, first.sbp if is_alike else copies)
            x = x if same is None else same
        converted.append(x)
    return converted


# Split a full tensor only if each worker gets at least this many cells of each dim.
_FEWEST_CELLS = 4


# Move a tensor only if this makes what neighbours read smaller by this factor.
_FEWER_CELLS = 2


def _cut(kind: type[GlobalTensor], scope: Scope, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Split the first tensor like the network's inputs, if windows would read much beyond blocks.

    A large tensor that every worker holds in full is cut without messages. One whose blocks are
    thin along a split dim, such as one frame of a video, is moved once, instead of a layer at each
    cut at every call. The input of a weight that a plan splits stays where the plan moves it.
    """
    x = tensors[0]
    if not isinstance(x, kind) or x.dim() != scope.dims or x.placement != scope.placement:
        return x
    grid, shape = x.placement.shape, tuple(x.shape)
    pairs = list(zip(scope.home, grid, strict=False))
    if not pairs or any(shape[d] < _FEWEST_CELLS * n for d, n in pairs if d > 1):
        return x
    home = tuple(split(d) for d, _ in pairs)
    is_thin = all(attribute.is_split and attribute.dim > 1 for attribute in x.sbp) and (
        share_at_cuts(x.sbp, shape, grid) >= _FEWER_CELLS * share_at_cuts(home, shape, grid)
    )
    if not (x.is_copy_everywhere or is_thin):
        return x
    is_planned = any(isinstance(w, kind) and not w.is_copy_everywhere for w in tensors[1:])
    return x if is_planned else x.to_global(sbp=home)


def _plain(x: torch.Tensor, placement: Placement) -> torch.Tensor:
    if isinstance(x, OuterTensor):
        return x
    return x if placement.active or not x.dim() else x.reshape(-1)[:0]


def _common_placement(
    kind: type[GlobalTensor], function: Any, tensors: Sequence[torch.Tensor]
) -> Placement:
    """Return the placement that all global tensors share.

    Within a converted network, plain tensors count as replicated. Elsewhere they must have no dims
    and the same value on all ranks; those that require grad are global by now.
    """
    placements = [x.placement for x in tensors if isinstance(x, kind)]
    other = next((placement for placement in placements if placement != placements[0]), None)
    if other is not None:
        raise PartitionError(
            f"{name_of(function)}: tensors are on {placements[0]!r} and on {other!r}; move one to "
            "the other's placement, x.to_global(y.placement, sbp)"
        )
    if current_scope() is not None:
        return placements[0]
    for x in tensors:
        if isinstance(x, kind):
            continue
        if x.dim() or (x.requires_grad and type(x) not in PLAIN):
            whole = next(list(y.shape) for y in tensors if isinstance(y, kind))
            text = (
                f"{name_of(function)}: a plain tensor of shape {list(x.shape)} is used with a "
                f"global one of shape {whole}; convert it, gpudist.to_global(x, y.placement, sbp), "
                "where sbp is gpudist.sbp.broadcast if each rank has all of it, and otherwise "
                "says for each axis what the rank has, as gpudist.sbp.split(dim) does for a block"
            )
            if x.dim() and list(x.shape) != whole:
                raise ShapeError(text)
            raise PartitionError(
                f"{text}. Only a tensor of torch's own class that has no dims or requires grad, "
                "and is equal on all ranks, may stay plain"
            )
    return placements[0]


def _require_constants(function: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Raise if a plain tensor that is changed in place would get a gradient."""
    if tensors[0].requires_grad or (
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    ):
        raise PartitionError(
            f"{name_of(function)}: a plain tensor of shape {list(tensors[0].shape)} is changed in "
            "place by a global one, and gradients would pass through it; make a new tensor, "
            "total = total + loss, or detach the global one"
        )


def _layout(kind: type[GlobalTensor], placement: Placement, x: torch.Tensor) -> Layout:
    return x.global_layout if isinstance(x, kind) else placement.copies(tuple(x.shape))


@cache
def _place_of_inplace(function: Any) -> int | None:
    try:
        return list(inspect.signature(function).parameters).index("inplace")
    except (TypeError, ValueError):
        return None


def changes_first(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments request work in place, like ``F.relu(x, inplace=True)``."""
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    place = _place_of_inplace(function) if len(args) > 1 else None
    return place is not None and place < len(args) and bool(args[place])


def _explanation(call: Call, layouts: Sequence[Layout], derivation: Derivation) -> str:
    inputs = ", ".join(
        f"{before.sbp}" if before == after else f"{before.sbp} boxed to {after.sbp}"
        for before, after in zip(layouts, derivation.inputs, strict=True)
    )
    outputs = ", ".join(f"{layout.sbp}" for layout in derivation.outputs)
    return f"{name_of(call.function)}: {inputs} -> {outputs}; {derivation.bytes} bytes boxed"
