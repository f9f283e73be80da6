"""Emulate views that had to be copied: keep them equal to their base.

A result is a view if torch's function shares memory on meta tensors with the strides of the whole
tensors. A view that had to be boxed, or whose part was copied, has memory of its own. In-place
changes of the view are written to its base. After a change of the base, through any tensor that
shares its memory, the view is outdated: it has no cells until it is used, which computes them
again. To do so at once would let ranks disagree, since some may have freed a view that others still
hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch

from gpudist.errors import ShapeError
from gpudist.sbp.call import Call, share_memory
from gpudist.sbp.trees import map_tree, tensors_in

T = torch.Tensor


@dataclass(frozen=True)
class EmulatedView:
    """Relation of an emulated view to its base.

    Attributes:
        base: tensor that it is a view of.
        make: computes the view from its base.
        write: writes the changed view to its base; ``None`` if that is not supported.
        is_copy: whether it has memory of its own; otherwise its base is a view that is a copy.
    """

    base: torch.Tensor
    make: Callable[[Any], torch.Tensor]
    write: Callable[[Any, torch.Tensor], object] | None
    is_copy: bool


# Emulated views that are not outdated, by the memory of their base.
copies_of_memory: dict[int, list[ReferenceType[Any]]] = {}


def view_of(x: torch.Tensor) -> EmulatedView | None:
    """Return the emulated view of ``x``, or ``None``."""
    return vars(x).get("_view")


def forget(x: torch.Tensor) -> None:
    """Make an emulated view a tensor of its own, which no longer follows its base."""
    vars(x).pop("_view", None)


def is_copy(x: torch.Tensor) -> bool:
    """Return whether ``x`` is a copy of what would be a view in torch."""
    view = view_of(x)
    return view is not None and view.is_copy


def note(
    y: Any,
    base: Any,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call | None,
    is_copy: bool,
    place: int = 0,
) -> None:
    """Record that ``y`` is an emulated view of ``base``, unless they share memory.

    Args:
        y: result of the function.
        base: the tensor of the call that it is a view of.
        function, args, kwargs: call that returned it.
        call: operator that carried it out, ``None`` if whole tensors were gathered.
        is_copy: whether it has memory of its own, on every rank alike.
        place: position of ``y`` among the results.
    """
    is_shared = share_memory(y._local, base._local) or not base.placement.active
    if is_shared and not is_copy and view_of(base) is None:
        return

    def make(source: Any) -> torch.Tensor:
        positional, named = map_tree((args, kwargs), lambda x: source if x is base else x)
        return tensors_in(function(*positional, **named))[place]

    if is_shared and is_copy:
        # They may share memory on this rank alone, for example on the rank that holds the only
        # term.
        y._local = y._local.clone()
    vars(base)["_has_views"] = True
    if is_shared or is_copy:
        link(y, EmulatedView(base, make, None if call is None else _writer(call), is_copy))
    else:
        # Other ranks may share memory, so nothing may move.
        link(y, EmulatedView(base, partial(_reshape_part, y._global_spec), _write_part, True))


def _reshape_part(spec: Any, base: Any) -> torch.Tensor:
    local = base._local.reshape(spec.layout.box(spec.placement.index).shape)
    return base._wrap(local, spec.placement, spec.sbp, spec.shape, spec.strides)


def _write_part(base: Any, changed: Any) -> None:
    base._local.copy_(changed._local.reshape(base._local.shape))
    propagate_change(base)


def follow(x: Any, y: Any, alias: Callable[[Any], Any]) -> Any:
    """Return ``y = alias(x)``, which shares its memory: if ``x`` is an emulated view, a view, too.

    Its base is ``alias`` of the base, so that changes have the same gradients as in torch.
    """
    view = view_of(x)
    if view is not None:
        make = view.make
        link(y, replace(view, base=alias(view.base), make=lambda base: alias(make(base))))
    return y


def link(y: torch.Tensor, view: EmulatedView) -> None:
    """Make ``y`` an emulated view, in place of the one that it was."""
    before = view_of(y)
    vars(y)["_view"] = view
    if is_outdated(y):
        return
    if before is not None:
        watched = copies_of_memory.get(_memory(before.base), [])
        watched[:] = [reference for reference in watched if reference() is not y]
    _watch(_memory(view.base), y)


def _writer(call: Call) -> Callable[[Any, torch.Tensor], object] | None:
    if call.function is torch.reshape:
        return lambda base, changed: base.copy_(torch.reshape(changed, tuple(base.shape)))
    if call.function is T.__getitem__:
        return lambda base, changed: base.__setitem__(call.args[1], changed)
    return None


def _watch(memory: int, y: Any) -> None:
    def forget(reference: ReferenceType[Any]) -> None:
        references = copies_of_memory.get(memory, [])
        if reference in references:
            references.remove(reference)
        if not references:
            copies_of_memory.pop(memory, None)

    copies_of_memory.setdefault(memory, []).append(ref(y, forget))


def _memory(x: Any) -> int:
    # The mode of a converted network takes longer.
    with torch._C.DisableTorchFunction():
        return x._local.untyped_storage()._cdata


def may_be_followed(x: torch.Tensor) -> bool:
    """Return whether ``x`` is or ever had an emulated view: the same on every rank.

    Whether views still exist may differ between ranks.
    """
    return "_has_views" in vars(x) or view_of(x) is not None


def concerns(x: torch.Tensor) -> bool:
    """Return whether changing ``x`` affects tensors that do not share its memory."""
    return bool(copies_of_memory) and (_memory(x) in copies_of_memory or view_of(x) is not None)


def require_writable(name: str, x: torch.Tensor) -> None:
    """Raise if ``x`` is an emulated view whose base cannot be updated.

    Raises:
        ShapeError: on every rank alike.
    """
    view = view_of(x)
    while view is not None:
        if view.is_copy and view.write is None:
            raise ShapeError(
                f"{name}: this view is a copy, because its base had to be boxed or gathered, so "
                "the change would not reach the base; change the base, box the base first with "
                "to_global, or clone this tensor"
            )
        view = view_of(view.base)


def propagate_change(x: Any) -> None:
    """Propagate an in-place change of ``x`` to all tensors that should share its memory."""
    _outdate_views(_memory(x), x)
    view = view_of(x)
    if view is None:
        return
    if view.is_copy:
        assert view.write is not None
        # This writes to the base in place, which updates the base's other views in turn.
        view.write(view.base, x if x.requires_grad else x.like(x._local.detach()))
    else:
        propagate_change(view.base)


def _outdate_views(memory: int, but: Any) -> None:
    """Outdate the emulated views of this memory that have memory of their own."""
    for reference in copies_of_memory.pop(memory, []):
        y = reference()
        view = None if y is None else view_of(y)
        if view is None:
            continue
        if y is not but and (view.is_copy or _memory(y) != memory):
            outdate(y)
        else:
            _watch(memory, y)


def outdate(y: Any) -> None:
    """Drop the cells of an emulated view and of all its views; their next use computes them."""
    local = vars(y).pop("_local", None)
    if local is None:
        return
    for reference in copies_of_memory.pop(local.untyped_storage()._cdata, []):
        other = reference()
        if other is not None:
            outdate(other)


def is_outdated(x: torch.Tensor) -> bool:
    """Return whether the base of ``x`` has changed, and its cells are not computed yet."""
    return "_local" not in vars(x) and view_of(x) is not None


def renew(y: Any) -> torch.Tensor:
    """Compute the cells of an outdated view, and return this rank's part. Collective."""
    view = view_of(y)
    assert view is not None
    with as_made(view.base):
        result: Any = view.make(view.base)
        # To compute a spectrum links its parts to it.
        view = view_of(y) or view
        is_alias = view.is_copy and _memory(result) == _memory(view.base)
        local = result._local.clone() if is_alias else result._local
    vars(y)["_local"] = local
    _watch(_memory(view.base), y)
    return local


def source_of(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or the tensor with cells that the outdated view ``x`` follows."""
    while is_outdated(x):
        view = view_of(x)
        assert view is not None
        x = view.base
    return x


@contextmanager
def as_made(base: Any) -> Iterator[None]:
    """Compute in the modes that the base was made in, whatever the modes are now."""
    local = base._local
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled() and not local.is_inference():
            modes.enter_context(torch.inference_mode(False))
        if local.requires_grad and not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        yield
