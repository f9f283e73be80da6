"""Intercept calls in a converted network that are not operators on global tensors.

The interception is limited to a scope and its thread. All workers draw the same random numbers, and
parameters are replaced by the copies made for this call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from gpudist.exchange.tracing import is_recorded, leave_untraced
from gpudist.nn.autocast_on_meta import patched_autocast
from gpudist.sbp.call_cache import call_cached
from gpudist.sbp.copies import copy_of, needs_copies, with_copies
from gpudist.sbp.drawing import DRAWING, WITHOUT_INDEX, Drawing, may_draw
from gpudist.sbp.explain import is_explaining
from gpudist.sbp.fresh import FACTORIES, FreshTensors
from gpudist.sbp.functions import dispatch_functions
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.sbp.global_tensor import UNTRACED, GlobalTensor
from gpudist.sbp.methods import METADATA, METHODS
from gpudist.sbp.outer import OuterTensor, materialize_in, outer, without_cells
from gpudist.sbp.registry import name_of
from gpudist.sbp.scope import AnyDraws, Draws, Scope, current_scope, enter_scope
from gpudist.sbp.setters import SETTERS, call_setter, listed
from gpudist.sbp.signatures.elementwise import ELEMENTWISE
from gpudist.sbp.spectra import zeros
from gpudist.sbp.spectrum import Spectrum
from gpudist.sbp.terms import OF_GRADIENTS
from gpudist.sbp.trees import tensors_in

_GLOBAL = (GlobalTensor,)
# Types of the arguments of most operators.
_OPERANDS = {_GLOBAL, (GlobalTensor, torch.Tensor), (torch.Tensor, GlobalTensor)}
# Functions that are replaced where all tensors are plain.
_REPLACED = {*SETTERS, *OF_GRADIENTS, *FACTORIES, *ELEMENTWISE, *DRAWING}


class _Interception(Drawing):
    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.scope = scope
        self.fresh = FreshTensors()
        scope.fresh, scope.modes = self.fresh.refs, len(_active_modes()) + 1
        # A network called within another one hides calls from the other one's mode.
        for outer_mode in _active_modes():
            if isinstance(outer_mode, _Interception):
                outer_mode.fresh.refs.clear()

    @leave_untraced(UNTRACED)
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, pins, fresh = kwargs or {}, self.scope.pins, self.fresh
        record = self.scope.record
        if record is not None and not record.function:
            # For the rows of a plan.
            record.function = name_of(func).rpartition(".")[2]
            try:
                return self.__torch_function__(func, types, args, kwargs)
            finally:
                record.function = ""
        if types == _GLOBAL and func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_operator = types in _OPERANDS and not (
            func in METHODS or func in METADATA or func in FACTORIES or func in WITHOUT_INDEX
        )
        if not fresh.refs:
            is_free = pins is None or func in pins.unpinned
            if is_operator and (pins is None or is_free or pins.passes(self.scope, func)):
                return call_cached(GlobalTensor, func, args, kwargs)
            is_plain = is_free and not (types or kwargs or func in _REPLACED)
            if is_plain and not needs_copies(self.scope, args, False):
                return func(*args)
        name = "" if pins is None else pins.name_if_pinned(func)
        # A prescribed layout is not changed.
        is_fresh = func in FACTORIES and not name and "out" not in kwargs
        is_fresh = is_fresh and current_scope() is self.scope
        if fresh.refs and func not in METADATA:
            is_fresh = fresh.note_use(func, args, kwargs) or is_fresh
        if pins is not None and name:

            def compute(args: Any, kwargs: Any) -> Any:
                # A pin may have moved another kind of tensor.
                return self._compute(func, {*map(type, tensors_in([args, kwargs]))}, args, kwargs)

            result = pins.around(self.scope, name, args, kwargs, compute)
        elif is_operator:
            result = call_cached(GlobalTensor, func, args, kwargs)
        else:
            result = self._compute(func, types, args, kwargs)
        if is_fresh:
            fresh.note(result)
        return result

    def _compute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in SETTERS and OuterTensor not in types:
            return call_setter(self.scope, func, *args, **kwargs)
        if GlobalParameter in types:
            with self:
                return GlobalParameter.__torch_function__(func, types, args, kwargs)
        if GlobalTensor in types or Spectrum in types:
            return self._of_global(func, types, args, kwargs)
        if OuterTensor in types:
            answer = without_cells(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
            args, kwargs = materialize_in(func, args, kwargs)
            if any(isinstance(x, GlobalTensor) for x in tensors_in([args, kwargs])):
                return func(*args, **kwargs)
        if needs_copies(self.scope, (*args, *kwargs.values()), False):
            replaced = with_copies(self.scope, func, args, kwargs, False)
            if replaced is not None:
                result = self.__torch_function__(func, types, *replaced)
                # What changes a parameter in place returns the parameter.
                return args[0] if args and result is replaced[0][0] else result
        if func in OF_GRADIENTS and self.scope.placement.partition.size > 1:
            return OF_GRADIENTS[func](self.scope, func, *args, **kwargs)
        if func is torch.zeros:
            answer = zeros(self.scope, *args, **kwargs)
            return func(*args, **kwargs) if answer is NotImplemented else answer
        if func in ELEMENTWISE:
            answer = outer(GlobalTensor, self.scope.placement, func, args, kwargs)
            return func(*args, **kwargs) if answer is None else answer
        return self.draw(func, args, kwargs)

    def _of_global(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kind = Spectrum if Spectrum in types else GlobalTensor
        if func not in WITHOUT_INDEX or not may_draw(func, args):
            return kind.__torch_function__(func, types, args, kwargs)
        return self.call_whole(partial(kind.__torch_function__, func, types, args, kwargs), (), {})


_modules: Any = torch.nn.modules.module
# A mode is inactive while it handles a function.
_active_modes: Any = torch.overrides._get_current_function_mode_stack


def is_intercepting(scope: Scope) -> bool:
    """Return whether functions called on this thread are handled by ``scope``."""
    return any(isinstance(mode, _Interception) and mode.scope is scope for mode in _active_modes())


_register_parameter: Callable[..., None] = _modules.Module.register_parameter


def _register_copies_too(self: Any, name: str, param: Any) -> None:
    scope = current_scope()
    is_copy = scope is not None and id(param) in scope.originals
    if type(param) is GlobalTensor and scope is not None:
        listed(scope, param)
    _register_parameter(self, name, None if is_copy else param)
    if is_copy:
        # torch's own function refuses tensors that are not leaves.
        self._parameters[name] = param
    elif scope is not None and id(self) in scope.paths():
        # The network lists it from now on, so functions of plain tensors receive its copy, too.
        copy_of(scope, param)


@contextmanager
def intercept(scope: AnyDraws) -> Iterator[AnyDraws]:
    """Make ``scope`` the current scope of this thread, and intercept its calls."""
    mode = _Interception(scope) if isinstance(scope, Scope) else Drawing(scope)
    autocast = patched_autocast
    if isinstance(scope, Scope) and scope.placement.type != "meta":
        autocast = nullcontext
        scope.binds = scope.record is None and not is_explaining() and not is_recorded()
    register_copies()
    with autocast(), enter_scope(scope), mode:
        yield scope


@contextmanager
def draws_by_index() -> Iterator[None]:
    """Draw random numbers as a converted network does, in a network that is not converted.

    Within this context, the sequential network drops the same cells, and draws the same numbers,
    as the network that :func:`gpudist.distribute` makes of it, on any grid. Both draw their seed
    from torch's default CPU generator: the context when it is entered, the converted network at its
    first call on rank 0. Call ``torch.manual_seed`` before either, and make the calls of several
    steps in one context. Backward may run outside of it.

    The context neither communicates nor needs a world. It applies to this thread.

    Cost:
        Per cell about 25 torch operations on 8 bytes, as in the converted network.
    """
    seed = int(torch.randint(1 << 62, ()).item())
    with intercept(Draws(seed=seed)):
        yield


def register_copies() -> None:
    """Let modules list the copies of parameters that a network registers in a call.

    Outside of scopes, this is torch's own function. It stays, because a change of a class makes
    Python look up all attributes of its instances again, which takes more time than a layer.
    """
    dispatch_functions()
    if _modules.Module.register_parameter is not _register_copies_too:
        _modules.Module.register_parameter = _register_copies_too
