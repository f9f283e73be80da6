"""Operators that were carried out before, on tensors that lay alike: nothing is derived."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gpudist.sbp.dispatch import (
    Noted,
    Prepared,
    boxed,
    dispatch,
    is_copy_of_view,
    note_view,
)
from gpudist.sbp.explain import is_explaining
from gpudist.sbp.lies import Lies, lies, wrapped
from gpudist.sbp.registry import Rule, signatures
from gpudist.sbp.scope import current_scope

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor

_REMEMBERED_CALLS = 1024
# Values that are told apart by themselves and their type.
_FACTS = frozenset({int, bool, str, NoneType, torch.dtype, torch.device, torch.memory_format})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class _Call(NamedTuple):
    """How a call of one function on tensors that lie in one way is carried out.

    Attributes:
        prepared: how.
        results: how each result lies; none if the function changes its first tensor.
        is_one: there is one result, and it is a tensor.
        is_view: the results would share the memory of the first argument, were they not boxed.
    """

    prepared: Prepared
    results: tuple[Lies, ...]
    is_one: bool
    is_view: bool


def recalled(
    kind: type[GlobalTensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Carry out ``function``: as before if it was called so before, else as it is derived."""
    told = _told(kind, function, args, kwargs)
    if told is None:
        return dispatch(kind, function, args, kwargs)
    first, key, local = told
    call = first.calls.get(key)
    if call is None or is_explaining() or (not call.results and is_copy_of_view(args[0])):
        return _derived(kind, function, args, kwargs, first, key)
    prepared = call.prepared
    if prepared.movements:
        local = boxed(prepared.movements, local)
    if prepared.compute is not None:
        result = prepared.compute(local)
    elif prepared.movements or len(local) < len(args):
        parts = iter(local)
        own = [next(parts) if isinstance(x, torch.Tensor) else x for x in args]
        result = function(*own, **kwargs)
    else:
        result = function(*local, **kwargs)
    if not call.results:
        return args[0]
    if call.is_one:
        y = _wrapped(kind, result, call.results[0])
        if call.is_view:
            note_view(prepared, args[0], (y,))
        return y
    found = [_wrapped(kind, y, how) for y, how in zip(result, call.results, strict=True)]
    if call.is_view:
        note_view(prepared, args[0], found)
    return type(result)(found)


def _wrapped(kind: type[GlobalTensor], local: torch.Tensor, how: Lies) -> GlobalTensor:
    if local.dtype != how.dtype:
        # As under autocast.
        how = lies(how.placement, how.sbp, how.shape, local.dtype)
    return wrapped(kind, local, how)


def _told(
    kind: type[GlobalTensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Lies, Any, list[torch.Tensor]] | None:
    """How the first tensor lies, what tells the call from others, and the parts of the tensors.

    ``None`` for calls that are not remembered.
    """
    first: Lies | None = None
    key: list[Any] = [function]
    local: list[torch.Tensor] = []
    for x in args:
        type_of = type(x)
        if type_of is kind:
            how = x._lies
            if first is None:
                first = how
            key.append(how)
            local.append(x._local)
        elif type_of in _FACTS:
            key += (type_of, x)
        elif type_of is float:
            entry = signatures.get(function)
            # Zeros of both signs are equal.
            is_any = isinstance(entry, Rule) and entry.any_float
            key += (float, None if is_any else x or repr(x))
        elif type_of is tuple:
            for part in x:
                if type(part) is not int:
                    return None
            key.append(x)
        elif type_of in _PLAIN:
            if x.dim() and current_scope() is None:
                return None
            key += (x.shape, x.dtype)
            local.append(x)
        else:
            return None
    if first is None:
        return None
    for name, x in kwargs.items():
        if type(x) not in _FACTS:
            return None
        key += (name, type(x), x)
    return first, tuple(key), local


def _derived(
    kind: type[GlobalTensor],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    first: Lies,
    key: Any,
) -> Any:
    """The result of a call that is new, to be remembered if it is of the simple kind."""
    noted: list[Noted] = []
    result = dispatch(kind, function, args, kwargs, noted)
    if len(noted) != 1 or not first.placement.active:
        return result
    prepared, results, is_view = noted[0]
    is_one = isinstance(result, torch.Tensor)
    if results and not is_one and type(result) not in (tuple, list):
        return result
    if results and len(results) != (1 if is_one else len(result)):
        return result
    if len(first.calls) >= _REMEMBERED_CALLS:
        first.calls.clear()
    first.calls[key] = _Call(prepared, tuple(y._lies for y in results), is_one, is_view)
    return result
