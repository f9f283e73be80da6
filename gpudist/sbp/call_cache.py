"""Repeat operators called before on the same layouts, without deriving signatures again.

The cache finds a bound call by the arguments; a converted network's modules keep those of their
forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from logging import DEBUG
from operator import itemgetter
from types import EllipsisType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gpudist.nn.autocast import in_dtypes_of_torch, is_wide
from gpudist.sbp import views
from gpudist.sbp.arguments import bind_arguments
from gpudist.sbp.bound_call import BoundCall, derivations
from gpudist.sbp.call import Slot
from gpudist.sbp.copies import require_copies, substitute_of, with_copies
from gpudist.sbp.dispatch import OperatorCall, dispatch
from gpudist.sbp.done import done, part_of
from gpudist.sbp.explain import debug_logs, is_explaining, open_lines
from gpudist.sbp.global_spec import GlobalSpec
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import Composite, Rule, signatures
from gpudist.sbp.scope import Scope, current_draws, current_scope
from gpudist.sbp.signatures.elementwise import ELEMENTWISE
from gpudist.sbp.trees import has_any, tensors_in

if TYPE_CHECKING:
    from gpudist.sbp.global_tensor import GlobalTensor

_transforms_active: Any = torch._C._are_functorch_transforms_active  # pyright: ignore
_any_autocast: Any = torch._C._is_any_autocast_enabled  # pyright: ignore
# Types whose values are part of the cache key, together with the type.
_FACTS = frozenset(
    {int, bool, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.memory_format}
)
_SEQUENCES = frozenset({tuple, list, torch.Size})
_INTEGERS = {int}
_Plain = torch.Tensor
_PLAIN = frozenset({_Plain, torch.nn.Parameter})


class _CachedComposite(NamedTuple):
    """Function that stands for another one, and calls operators with entries of their own."""

    function: Any
    part: bytes


@contextmanager
def without_cache() -> Iterator[None]:
    """Disable the cache within the context: derive every call."""
    derivations.anew += 1
    try:
        yield
    finally:
        derivations.anew -= 1


def call_cached(
    kind: type[GlobalTensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function``, from the cache if the same call was made before."""
    values: list[Any] = [function]
    local: list[torch.Tensor] = []
    first: GlobalSpec | None = None
    scope: Scope | None = None
    replacing: Scope | None = None
    for arguments in (args, kwargs.values()) if kwargs else (args,):
        for x in arguments:
            type_of = type(x)
            if type_of is kind:
                spec = x._global_spec
                if first is None and arguments is args:
                    first = spec
                values.append(spec)
                local.append(x._local)
            elif type_of in _FACTS:
                values += (type_of, x)
            elif type_of is float:
                # 0.0 and -0.0 compare equal, but may give different results.
                any_float = getattr(signatures.get(function), "any_float", False)
                values += (float, None if any_float else x or repr(x))
                if any_float and done.parts is not None:
                    done.parts.append(repr(x).encode())
            elif type_of is tuple and {*map(type, x)} == _INTEGERS:
                values.append(x)
            elif type_of in _SEQUENCES:
                part = _key_of_parts(kind, x, local)
                if part is None:
                    return _call_without_key(kind, function, args, kwargs)
                values.append(part)
                if first is None and arguments is args:
                    first = next((y._global_spec for y in x if type(y) is kind), None)
            elif type_of in _PLAIN:
                scope = scope or current_scope()
                if scope is None:
                    if x.dim() or x.requires_grad:
                        return _call_without_key(kind, function, args, kwargs)
                elif id(x) in scope.substitutes or (
                    scope.learns and (type_of is _Plain or x.is_leaf)
                ):
                    substitute = substitute_of(scope, function, x)
                    if substitute is not x:
                        x, replacing = substitute, scope
                        if type(x) not in _PLAIN:
                            return _call_without_key(kind, function, args, kwargs)
                values += (x.shape, x.dtype)
                local.append(x)
            else:
                return _call_without_key(kind, function, args, kwargs)
    if first is None:
        return _call_without_key(kind, function, args, kwargs)
    if kwargs:
        values.append(tuple(kwargs))
    if _any_autocast():
        on = first.placement.autocast
        values.append(on and torch.get_autocast_dtype(on))
    key = tuple(values)
    call: BoundCall | _CachedComposite | None = first.calls.get(key)
    is_explained = (open_lines.get() or debug_logs.get(DEBUG, True)) and is_explaining()
    if call is None or is_explained or derivations.anew or _transforms_active():
        return _derive(kind, function, args, kwargs, first, key, replacing)
    if isinstance(call, _CachedComposite):
        if replacing is not None:
            return _derive(kind, function, args, kwargs, first, key, replacing)
        outer, done.parts = done.parts, None
        if outer is not None and call.part:
            outer.append(call.part)
        try:
            return call.function(*args, **kwargs)
        except NotImplementedError:
            # Computed on whole tensors instead.
            return _derive(kind, function, args, kwargs, first, key, replacing)
        finally:
            done.parts = outer
    must_check = call.draws > 0 and current_draws() is None
    if call.result is None and not call.results:
        if type(args[0]) is kind:
            must_check |= bool(views.copies_of_memory) and views.concerns(args[0])
        else:
            must_check |= current_scope() is None
    if must_check:
        return _derive(kind, function, args, kwargs, first, key, replacing)
    if done.parts is not None:
        done.parts.append(call.part)
    return call(kind, local, function, args, kwargs)


def _call_without_key(
    kind: type[GlobalTensor], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``function``, which the cache cannot find by these arguments."""
    scope = current_scope()
    replaced = None if scope is None else with_copies(scope, function, args, kwargs)
    if replaced is not None:
        return call_cached(kind, function, *replaced)
    if scope is not None:
        require_copies(scope, function, (*args, *kwargs.values()))
    return _dispatch_and_list(kind, function, args, kwargs, (function, args, kwargs))[0]


def _key_of_parts(
    kind: type[GlobalTensor], parts: Any, local: list[torch.Tensor]
) -> tuple[Any, ...] | None:
    """Return the key of a list or tuple of integers and slices, or of tensors."""
    key: list[Any] = [type(parts)]
    for x in parts:
        type_of = type(x)
        if type_of is int or type_of is NoneType or type_of is EllipsisType:
            key.append(x)
        elif type_of is kind:
            key.append(x._global_spec)
            local.append(x._local)
        elif type_of is slice:
            bounds = (x.start, x.stop, x.step)
            for bound in bounds:
                if type(bound) is not int and bound is not None:
                    return None
            key.append(bounds)
        else:
            return None
    return tuple(key)


@contextmanager
def _listing(parts: list[bytes] | None) -> Iterator[list[OperatorCall | None]]:
    """List the operators that are called in this context, and what is done in ``parts``."""
    operators: list[OperatorCall | None] = []
    derivations.open.append(operators)
    outer, done.parts = done.parts, parts
    try:
        yield operators
    finally:
        derivations.open.pop()
        done.parts = outer
    if derivations.open:
        derivations.open[-1].extend(operators)


def _dispatch_and_list(
    kind: type[GlobalTensor],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: tuple[Any, ...],
) -> tuple[Any, list[OperatorCall | None], bytes]:
    # The operators of which a new call consists, and its part, which ``call`` describes.
    with _listing(None) as operators:
        result = dispatch(kind, function, args, kwargs, operators)
    # Programs keep plain results, such as ``grid.to(x)``, which some workers may have already.
    part = part_of(call) if has_any([result], kind) else b""
    if part and done.parts is not None:
        done.parts.append(part)
    return result, operators, part


def _derive(
    kind: type[GlobalTensor],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    first: GlobalSpec,
    key: Any,
    scope: Scope | None,
) -> Any:
    """Derive a new call, and cache it if it is a single operator on its own tensors.

    A composite of several operators is cached as a function to call. Calls that draw random numbers
    are cached if their rule draws anew whenever it computes.
    """
    if scope is not None:
        args, kwargs = with_copies(scope, function, args, kwargs) or (args, kwargs)
    state = current_draws()
    before = 0 if state is None else state.draws
    result, operators, part = _dispatch_and_list(kind, function, args, kwargs, key)
    draws = 0 if state is None else state.draws - before
    call = None
    if first.placement.active:
        call = _single(first.placement, function, args, kwargs, result, operators, draws, part)
    if call is None and scope is None and None not in operators:
        call = _composite(kind, function, args, kwargs, part)
    if call is not None:
        first.calls[key] = call
    return result


def bind_forward(
    forward: Callable[[Any], Any], x: GlobalTensor, own: Container[int]
) -> tuple[Any, BoundCall | None, Sequence[torch.Tensor], Sequence[bytes]]:
    """Call a module's forward, and bind it if it is one operator of ``x`` and the module's tensors.

    Args:
        forward: the forward, in a scope.
        x: its argument.
        own: identities of the module's parameters and buffers.

    Returns:
        The result; the bound call, ``None`` if there is none; the tensors that it takes after
        ``x``, which are among ``own``; the parts that the call listed.
    """
    state, placement = current_draws(), x._global_spec.placement
    before = 0 if state is None else state.draws
    parts: list[bytes] = []
    with _listing(parts) as operators:
        y = forward(x)
    if done.parts is not None:
        done.parts += parts
    operator = operators[0] if len(operators) == 1 and placement.active else None
    if operator is None or type(y) is not type(x):
        return y, None, (), ()
    others = [part for part in operator.inputs if part is not x]
    if not all(id(part) in own for part in others):
        return y, None, (), ()
    draws = 0 if state is None else state.draws - before
    call = _single(placement, forward, (x, *others), {}, y, operators, draws, b"")
    return y, call, others, parts


def _single(
    placement: Placement,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    operators: list[OperatorCall | None],
    draws: int,
    part: bytes,
) -> BoundCall | None:
    """Return the call to cache if it is a single operator on its own tensors."""
    operator = operators[0] if len(operators) == 1 else None
    if operator is None:
        return None
    entry = signatures[operator.function]
    # A composite counts the draw of its operator.
    is_counted = function is operator.function or draws > 0
    if isinstance(entry, Rule) and not (entry.replicable or (entry.draws_anew and is_counted)):
        return None
    tensors = tensors_in([args, kwargs])
    order = None
    if len(tensors) != len(operator.inputs) or any(
        a is not b for a, b in zip(tensors, operator.inputs, strict=True)
    ):
        order = _order_of(placement, operator, tensors)
        if order is None:
            return None
    is_one = isinstance(result, torch.Tensor)
    results = (result,) if is_one else result
    if operator.results:
        holder, count = type(results), len(operator.results)
        is_list = holder in (tuple, list) or holder.__module__ == "torch.return_types"
        if (
            not is_list
            or len(results) != count
            or any(a is not b for a, b in zip(results, operator.results, strict=True))
        ):
            return None
    elif result is not args[0]:
        return None
    if not is_one and isinstance(operator.prepared.derivation.tree, Slot):
        return None  # A list of the only result.
    compute = operator.prepared.compute
    if compute is None and (
        function is not operator.function or len(tensors) < len(operator.inputs)
    ):
        compute = operator.prepared.derivation.with_arguments(operator.call).local.as_function
    if operator.call.autocast != placement.autocast:
        # Within the composite, autocast was off.
        dtypes = [y.dtype for y in operator.results]
        if compute is None or placement.autocast is None or not is_wide(dtypes):
            return None
        compute = in_dtypes_of_torch(compute, placement.autocast, dtypes)
    specs = tuple([y._global_spec for y in operator.results])
    spec = specs[0] if is_one and specs else None
    base = None
    if any(slot is not None for slot in operator.aliases):
        # All results are views of one argument.
        slot, *others = {*operator.aliases}
        base = next((i for i, x in enumerate(args) if x is operator.inputs[slot or 0]), None)
        if others or base is None or not hasattr(args[base], "_local"):
            return None
    alone = operator._replace(inputs=(), results=(), base=base)
    movements, holder = operator.prepared.movements, type(results)
    return BoundCall(movements, compute, spec, specs, holder, alone, order, draws, part)


def _order_of(
    placement: Placement, operator: OperatorCall, tensors: Sequence[torch.Tensor]
) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    # A tensor in two places may be two in another call with the same key, and a composite may do
    # something else where other workers have no part of the tensors.
    places = {id(x): i for i, x in enumerate(tensors)}
    numbers = [places.get(id(x)) for x in operator.inputs]
    is_known = len(places) == len(tensors) and None not in numbers and len(numbers) > 1
    is_everywhere = placement.partition.size == placement.partition.world.size
    return itemgetter(*numbers) if is_known and is_everywhere else None


def _composite(
    kind: type[GlobalTensor],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: bytes,
) -> _CachedComposite | None:
    """Return the composite that :func:`dispatch` would call with exactly these arguments."""
    entry = signatures.get(function)
    if not isinstance(entry, Composite) or function in ELEMENTWISE:
        return None
    if _any_autocast() or "out" in kwargs:
        return None
    bound, named = bind_arguments(function, args, kwargs)
    if bound is not args or list(named) != list(kwargs):
        return None
    # Outside of networks, calls of plain tensors with dims are not cached.
    is_cached = all([type(x) is kind or x.dim() > 0 for x in tensors_in([args, kwargs])])
    return _CachedComposite(entry.function, part) if is_cached else None
