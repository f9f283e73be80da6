"""Results that torch would have as views, and that are copies here: kept equal to what they show.

A view that had to be boxed has memory of its own. What is changed in place in it is written to the
tensor it would be a view of, and what is changed there, through whichever tensor with that memory,
is taken over by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch

from gpudist.sbp.registry import Call

T = torch.Tensor


@dataclass(frozen=True)
class View:
    """What a tensor would show.

    Attributes:
        base: of which tensor.
        make: the view anew.
        write: takes what was changed in the view over to the base; ``None`` where nobody knows how.
        is_copy: it has memory of its own; else its base is a view that is a copy.
    """

    base: torch.Tensor
    make: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], object] | None
    is_copy: bool


# By the memory that they do not share.
_copies: dict[int, list[ReferenceType[Any]]] = {}


def view_of(x: torch.Tensor) -> View | None:
    """What ``x`` would show, if it is a copy."""
    return vars(x).get("_view")


def is_copy(x: torch.Tensor) -> bool:
    """Whether it has memory of its own, where torch's would be that of what it shows."""
    view = view_of(x)
    return view is not None and view.is_copy


def note(
    y: Any,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    call: Call,
    is_copy: bool,
    place: int | None = None,
) -> None:
    """Note that ``y`` would be a view of ``args[0]``, if its memory does not tie it to that.

    Args:
        function, args, kwargs: what gave it.
        call: the operator that this is.
        is_copy: it has memory of its own, on every rank alike.
        place: of ``y`` among the results, ``None`` if it is the only one.
    """
    base: Any = args[0]
    if not is_copy and view_of(base) is None:
        return

    def make() -> torch.Tensor:
        made = function(*args, **kwargs)
        return made if place is None else made[place]

    vars(y)["_view"] = View(base, make, _writer(base, call), is_copy)
    if is_copy:
        if _memory(y) == _memory(base):
            # Shared on this rank alone, as a term is by the one that has it.
            y._local = y._local.clone()
        _watch(_memory(base), y)


def _writer(base: Any, call: Call) -> Callable[[torch.Tensor], object] | None:
    """What takes a change of a view over to ``base``, if it is a view of a kind that is known."""
    if call.function is torch.reshape:
        return lambda changed: base.copy_(torch.reshape(changed, tuple(base.shape)))
    if call.function is T.__getitem__:
        return lambda changed: base.__setitem__(call.args[1], changed)
    return None


def _watch(memory: int, y: Any) -> None:
    def forget(one: ReferenceType[Any]) -> None:
        found = _copies.get(memory, [])
        if one in found:
            found.remove(one)
        if not found:
            _copies.pop(memory, None)

    _copies.setdefault(memory, []).append(ref(y, forget))


def _memory(x: Any) -> int:
    return x._local.untyped_storage()._cdata


def concerns(x: torch.Tensor) -> bool:
    """Whether a change in ``x`` concerns tensors that do not share its memory."""
    return bool(_copies) and (_memory(x) in _copies or view_of(x) is not None)


def require_writable(name: str, x: torch.Tensor) -> None:
    """Refuse to change a copy of which nobody knows how to change the original.

    Raises:
        RuntimeError: on every rank alike.
    """
    view = view_of(x)
    while view is not None:
        if view.is_copy and view.write is None:
            raise RuntimeError(
                f"{name}: the tensor is a copy, because the one of which it would be a view had to "
                "be boxed; what is changed in it would be missing there. Box that one before, or "
                "clone this one"
            )
        view = view_of(view.base)


def changed(x: Any) -> None:
    """Take a change in place of ``x`` over to all that would share its memory."""
    _refresh(_memory(x), x)
    view = view_of(x)
    if view is None:
        return
    if view.is_copy:
        assert view.write is not None
        # Which changes the base in place, and takes that over in turn.
        view.write(x.detach() if not x.requires_grad else x)
    else:
        changed(view.base)


def _refresh(memory: int, but: Any) -> None:
    """Make the copies anew that would share this memory."""
    for one in _copies.pop(memory, []):
        y = one()
        view = None if y is None else view_of(y)
        if view is None:
            continue
        if y is not but:
            own = _memory(y)
            y._local = view.make()._local  # pyright: ignore
            _refresh(own, None)
        _watch(memory, y)
