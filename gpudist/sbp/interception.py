"""Intercept calls in a converted network that are not operators on global tensors.

The interception is limited to a scope and its thread. All workers draw the same random numbers, and
parameters are replaced by the copies made for this call. Everywhere, an ``autograd.Function`` of
global tensors is computed on full tensors (:mod:`gpudist.sbp.functions` dispatches it).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

from gpudist.errors import ConversionError
from gpudist.exchange.torch_library import is_traced
from gpudist.geometry.layout import broadcast
from gpudist.nn.autocast import META_AS
from gpudist.nn.autocast_on_meta import same_autocast
from gpudist.sbp.boxing import box_both_ways
from gpudist.sbp.call_cache import call_cached
from gpudist.sbp.copies import copy_of, needs_copies, require_copies, with_copies
from gpudist.sbp.drawing import DRAWING, WITHOUT_INDEX, Drawing, may_draw
from gpudist.sbp.fresh import FACTORIES, FreshTensors
from gpudist.sbp.functions import apply_to_plain, dispatch_functions
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.sbp.global_spec import GlobalSpec, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.methods import METADATA, METHODS, entry, gradient_of
from gpudist.sbp.outer import OuterTensor, materialize_in, outer, without_cells
from gpudist.sbp.placement import Placement
from gpudist.sbp.plain import shared
from gpudist.sbp.registry import map_tree, name_of, tensors_in
from gpudist.sbp.scope import (
    AnyDraws,
    Draws,
    Repeatable,
    Scope,
    current_draws,
    current_scope,
    enter_scope,
    resume,
    where_called,
)
from gpudist.sbp.signatures.elementwise import ELEMENTWISE
from gpudist.sbp.spectra import zeros
from gpudist.sbp.spectrum import Spectrum, compute_spectrum
from gpudist.sbp.terms import OF_GRADIENTS, is_users
from gpudist.sbp.unknown import cut_like, settle, stand_in

_GLOBAL = (GlobalTensor,)
# Types of the arguments of most operators.
_OPERANDS = {_GLOBAL, (GlobalTensor, torch.Tensor), (torch.Tensor, GlobalTensor)}
# Functions called so far that :func:`call_cached` computes for such arguments.
_operators: set[Any] = set()
# Functions called so far that nothing here replaces where all tensors are plain, such as the sum
# with which batch norm counts its batches.
_of_plain: set[Any] = set()


class _Intercepted(Drawing):
    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.scope = scope
        self.fresh = FreshTensors()
        # A network called within another one hides calls from the other one's mode.
        for outer_mode in _active_modes():
            if isinstance(outer_mode, _Intercepted):
                outer_mode.fresh.refs.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        pins = self.scope.pins
        is_free = pins is None or func in pins.unpinned
        is_plain = is_free and not self.fresh.refs
        if is_plain and types in _OPERANDS and func in _operators:
            return call_cached(GlobalTensor, func, args, kwargs)
        if types == _GLOBAL and func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_plain = is_plain and not (types or kwargs)
        if is_plain and func in _of_plain and not needs_copies(self.scope, args, False):
            return func(*args)
        is_pinned = pins is not None and pins.name_if_pinned(func) != ""
        is_fresh = func in FACTORIES and "out" not in kwargs and current_scope() is self.scope
        # A prescribed layout is not changed.
        is_fresh = is_fresh and not is_pinned
        if self.fresh.refs and func not in METADATA:
            is_fresh = self.fresh.used(func, args, kwargs) or is_fresh
        if not is_fresh:
            if not (func in METHODS or func in METADATA or func in WITHOUT_INDEX):
                if func not in FACTORIES:
                    _operators.add(func)
                if types in _OPERANDS and not is_pinned:
                    # What the methods below come to, on the path of most calls.
                    return call_cached(GlobalTensor, func, args, kwargs)
            return self._result(func, types, args, kwargs)
        result = self._result(func, types, args, kwargs)
        self.fresh.note(result)
        return result

    def _result(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pins = self.scope.pins
        name = "" if pins is None else pins.name_if_pinned(func)
        if pins is None or not name:
            return self._computed(func, types, args, kwargs)

        def compute(given: Any, named: Any) -> Any:
            if given is not args or named is not kwargs:
                return self._computed(func, _types_in(given, named), given, named)
            if types in _OPERANDS and func in _operators:
                return call_cached(GlobalTensor, func, args, kwargs)
            return self._computed(func, types, args, kwargs)

        return pins.around(self.scope, name, args, kwargs, compute)

    def _computed(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if GlobalParameter in types:
            with self:
                return GlobalParameter.__torch_function__(func, types, args, kwargs)
        if GlobalTensor in types or Spectrum in types:
            return self._of_global(func, types, args, kwargs)
        if OuterTensor in types:
            found = without_cells(func, args, kwargs)
            if found is not NotImplemented:
                return found
            args, kwargs = materialize_in(func, args, kwargs)
            if any(isinstance(x, GlobalTensor) for x in tensors_in([args, kwargs])):
                return func(*args, **kwargs)
        if needs_copies(self.scope, (*args, *kwargs.values()), False):
            given = with_copies(self.scope, func, args, kwargs, False)
            if given is not None:
                result = self.__torch_function__(func, types, *given)
                # What changes a parameter in place returns the parameter.
                return args[0] if args and result is given[0][0] else result
        if func in OF_GRADIENTS and self.scope.placement.partition.size > 1:
            return OF_GRADIENTS[func](self.scope, func, *args, **kwargs)
        if func is torch.zeros:
            found = zeros(self.scope, *args, **kwargs)
            return func(*args, **kwargs) if found is None else found
        if func in ELEMENTWISE:
            found = outer(GlobalTensor, self.scope.placement, func, args, kwargs)
            return func(*args, **kwargs) if found is None else found
        if not (types or func in OF_GRADIENTS or func in FACTORIES or func in DRAWING):
            _of_plain.add(func)
        return self.drawn(func, args, kwargs)

    def _of_global(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kind = Spectrum if Spectrum in types else GlobalTensor
        if func not in WITHOUT_INDEX or not may_draw(func, args):
            return kind.__torch_function__(func, types, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return kind.__torch_function__(func, types, args, kwargs)

        return self.whole(call, args, kwargs)


def _types_in(args: Any, kwargs: Any) -> set[type]:
    return {type(x) for x in tensors_in([args, kwargs])}


T = torch.Tensor
_checkpoint: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_modules: Any = torch.nn.modules.module
# A mode is inactive while it handles a function.
_active_modes: Any = torch.overrides._get_current_function_mode_stack
_lock = threading.Lock()
_open_count = 0
# Functions that only read the tensors they have saved.
_KEEPING = {"_NoopSaveInputs"}
# Functions that return their last arguments: those of full backward hooks, FSDP2 and DDP.
_IDENTITIES = {"BackwardHookFunction", "RegisterPostBackwardFunction", "_DDPSink"}


@entry(torch.autograd.Function)
def apply_function(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an ``autograd.Function`` in a scope, or to global tensors."""
    scope = current_scope()
    name = cls.__name__
    args, kwargs = materialize_in(cls, args, kwargs)
    own = _global_in(args, kwargs)
    if name == "CheckpointFunction" and (own or current_draws() is not None):
        run, preserve, *inputs = args
        return torch.utils.checkpoint.checkpoint(
            run, *inputs, use_reentrant=False, preserve_rng_state=preserve
        )
    if scope is not None and name not in _KEEPING:
        args, kwargs = with_copies(scope, cls, args, kwargs, bool(own)) or (args, kwargs)
        own = _global_in(args, kwargs)
        if is_traced() and _want_gradient([args, kwargs]):
            raise ConversionError(
                f"{where_called(scope)}: {name}.apply: a recorded graph cannot call the backward "
                "of a function; compute with torch's functions, call the network without "
                "gradients, or call it outside of gpudist.compiled"
            )
        if not own and _backward_gets_terms(scope, cls, args):
            convert = partial(_as_global_copies, scope, f"{name}.apply")
            args, kwargs = map_tree(args, convert), map_tree(kwargs, convert)
            own = _global_in(args, kwargs)
    if name == "CheckpointFunction":
        args = (Repeatable(args[0]), *args[1:])
    if not own or name in _KEEPING:
        return apply_to_plain(cls, args, kwargs)
    if name in _IDENTITIES:
        return _identity(cls, args)
    if scope is None and not _want_gradient([args, kwargs]):
        # Torch calls the forward without gradients, on operators with rules.
        return apply_to_plain(cls, args, kwargs)
    scope = scope or _scope_outside_of_networks(own[0].placement)
    return _on_whole(scope, cls, args, kwargs)


def _global_in(args: Any, kwargs: Any) -> list[GlobalTensor]:
    return [x for x in tensors_in([args, kwargs]) if isinstance(x, GlobalTensor)]


def _backward_gets_terms(scope: Scope, cls: Any, args: tuple[Any, ...]) -> bool:
    return (
        is_users(cls)
        and any(isinstance(x, T) and x.requires_grad for x in args)
        and _plain_gradients_are_terms(scope)
    )


def _plain_gradients_are_terms(scope: Scope) -> bool:
    # A rule's compute and the forward of an autograd.Function have parts and full tensors instead.
    return (
        torch.is_grad_enabled()
        and not scope.applying
        and scope.placement.partition.size > 1
        and any(isinstance(one, _Intercepted) and one.scope is scope for one in _active_modes())
    )


def _as_global_copies(scope: Scope, name: str, x: Any) -> Any:
    if isinstance(x, GlobalTensor) or not (isinstance(x, T) and x.requires_grad):
        return x
    require_copies(scope, name, [x])
    local = x if scope.placement.active else x.reshape(-1)[:0]
    layout = scope.placement.copies(tuple(x.shape))
    return GlobalTensor._wrap(local, scope.placement, layout.sbp, layout.shape)


def _want_gradient(given: Any) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(given))


def _scope_outside_of_networks(placement: Placement) -> Scope:
    remembered: dict[Any, Any] = placement.partition.wire.remembered
    key = "functions outside of a network", placement
    if key not in remembered:
        remembered[key] = Scope(placement, gather_limit_bytes=sys.maxsize)
    return remembered[key]


def _identity(cls: Any, args: Sequence[Any]) -> Any:
    given: list[Any] = [x._local if isinstance(x, GlobalTensor) else x for x in args]
    if cls.__name__ == "_DDPSink" and given[0]().find_unused_parameters:
        # Only the parts have the graph in which the reducer looks for unused parameters.
        network = given[0]()
        if network.require_forward_param_sync and not network.static_graph:
            network.reducer.prepare_for_backward([x for x in given[1:] if isinstance(x, T)])
    found = apply_to_plain(cls, given, {})
    found = found if isinstance(found, tuple) else (found,)
    ends = zip(args[len(args) - len(found) :], found, strict=True)
    return tuple([x.like(y) if isinstance(x, GlobalTensor) else y for x, y in ends])


@entry(torch.utils.hooks.BackwardHook)
class _BackwardHook(torch.utils.hooks.BackwardHook):
    """Adapter that calls the full backward hooks of a module with global gradients."""

    def __init__(self, module: Any, hooks: Any, pre_hooks: Any) -> None:
        self.given: Sequence[Any] = ()
        self.results: Sequence[Any] = ()
        super().__init__(
            module, [self._around(hook) for hook in hooks], [self._before(h) for h in pre_hooks]
        )

    def setup_input_hook(self, args: Any) -> Any:
        args = _with_global_gradients(self.module, args)
        self.given = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        return super().setup_input_hook(args)

    def setup_output_hook(self, args: Any) -> Any:
        args = _with_global_gradients(self.module, args)
        self.results = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        return super().setup_output_hook(args)

    def _around(self, hook: Any) -> Any:
        def call(module: Any, of_given: Any, of_results: Any) -> Any:
            wanted = _global_gradients(of_results, self.results)
            result = hook(module, _global_gradients(of_given, self.given), wanted)
            return _local_gradients(result, self.given)

        return call

    def _before(self, hook: Any) -> Any:
        def call(module: Any, of_results: Any) -> Any:
            result = hook(module, _global_gradients(of_results, self.results))
            return _local_gradients(result, self.results)

        return call


def _with_global_gradients(module: torch.nn.Module, args: Any) -> Any:
    scope = current_scope()
    if scope is None or not _plain_gradients_are_terms(scope):
        return args
    name = f"backward hook of {type(module).__name__}"
    return map_tree(args, partial(_as_global_copies, scope, name))


def _global_gradients(gradients: Any, tensors: Sequence[Any]) -> Any:
    return tuple(
        gradient_of(x, g) if isinstance(x, GlobalTensor) and g is not None else g
        for x, g in zip(tensors, gradients, strict=True)
    )


def _local_gradients(gradients: Any, tensors: Sequence[Any]) -> Any:
    """Return the parts of the gradients that a hook returned, in the original layout."""
    if gradients is None:
        return None
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return tuple(
        g.to_global(x.placement, gradient_of(x, x._local).sbp)._local
        if isinstance(g, GlobalTensor)
        else g
        for x, g in zip(tensors, gradients, strict=True)
    )


def _on_whole(scope: Scope, cls: Any, args: Any, kwargs: Any) -> Any:
    """Apply a function to full tensors; its backward receives full gradients."""
    given: list[Any] = list({id(x): x for x in tensors_in([args, kwargs])}.values())
    own = [x for x in given if isinstance(x, GlobalTensor)]
    split = [x for x in own if not x.is_copy_everywhere]
    settle(
        scope, f"{cls.__name__}.apply", split, "an autograd.Function has no rule for blocks", bool
    )
    placement = own[0].placement
    world, copies = placement.partition.world, (broadcast,) * placement.axes
    is_in_network = current_scope() is not None

    def once(x: torch.Tensor) -> torch.Tensor:
        """Return the full ``x``; every worker has its full gradient."""
        if isinstance(x, GlobalTensor):
            whole = x.to_global(placement, copies).to_local(grad_sbp=copies)
            return whole if placement.active else stand_in(whole, x.shape)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if is_in_network:
            require_copies(scope, f"{cls.__name__}.apply", [x])
        else:
            x = shared(f"{cls.__name__}.apply", x, placement)
        if not placement.active:
            return x.detach() + x.reshape(-1)[:0].sum()
        layout = placement.copies(tuple(x.shape))
        return box_both_ways(x, [layout], [layout, layout.dual], world)

    wholes = {id(x): once(x) for x in given}
    versions = [wholes[id(x)]._version for x in own]
    scope.applying += 1
    try:
        result = apply_to_plain(
            cls,
            map_tree(args, lambda x: wholes.get(id(x), x)),
            map_tree(kwargs, lambda x: wholes.get(id(x), x)),
        )
    finally:
        scope.applying -= 1
        if [wholes[id(x)]._version for x in own] != versions:
            raise ConversionError(
                f"{cls.__name__}.apply: the function changes an input in place, which is a copy of "
                "the tensor; return a new tensor"
            )
    like = max(split, key=lambda x: x.numel(), default=None)

    def back(y: Any) -> Any:
        if not isinstance(y, torch.Tensor):
            return y
        layout = placement.copies(tuple(y.shape))
        y = y if placement.active else y.reshape(-1)[:0]
        local = box_both_ways(y, [layout], [layout.dual, layout], world)
        whole = GlobalTensor._wrap(local, placement, copies, layout.shape)
        return cut_like(whole, like)

    return map_tree(result, back)


@entry(_checkpoint)
def _checkpointed(fn: Any, *args: Any, **kwargs: Any) -> Any:
    draws = current_draws()
    if draws is None:
        return _repeatable(fn, *args, **kwargs)
    for x in tensors_in([args, kwargs]):
        # Else the first call alone would compute it.
        compute_spectrum(x)
    # Torch saves these tensors for backward, and only the parts carry the graph.
    specs = [x._global_spec if isinstance(x, GlobalTensor) else None for x in args]
    parts = [x._local if isinstance(x, GlobalTensor) else x for x in args]
    repeated = _checkpoint(_resuming(fn, draws, specs), *parts, **kwargs)
    return _noted(draws, repeated) if isinstance(draws, Scope) else repeated


def _noted(scope: Scope, checkpoint: Iterator[None]) -> Iterator[None]:
    outer, scope.checkpoint = scope.checkpoint, scope.checkpoint or checkpoint
    try:
        # The caller runs the function itself while the generator waits.
        yield from checkpoint
    finally:
        scope.checkpoint = outer


def _repeatable(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    again = Repeatable(fn)
    # The caller runs the function itself while the generator waits.
    with again.running():
        yield from _checkpoint(again, *args, **kwargs)


def _resuming(fn: Any, scope: Draws, specs: Sequence[GlobalSpec | None]) -> Any:
    draws = scope.draws
    calls = dict(scope.calls) if isinstance(scope, Scope) else None
    autocast = same_autocast()

    def run(*args: Any, **kwargs: Any) -> Any:
        own = specs[len(specs) - len(args) :]
        given = [
            x if spec is None else wrap(GlobalTensor, x, spec)
            for x, spec in zip(args, own, strict=True)
        ]
        if current_draws() is scope and scope.draws == draws:
            return fn(*given, **kwargs)
        with autocast(), intercept(resume(scope, draws, calls)):
            return fn(*given, **kwargs)

    return run


_register_parameter: Callable[..., None] = _modules.Module.register_parameter


def _register_copies_too(self: Any, name: str, param: Any) -> None:
    scope = current_scope()
    is_copy = scope is not None and any(param is copy for copy in scope.substitutes.values())
    _register_parameter(self, name, None if is_copy else param)
    if is_copy:
        # torch's own function refuses tensors that are not leaves.
        self._parameters[name] = param
    elif scope is not None and id(self) in scope.paths():
        # The network lists it from now on, so functions of plain tensors receive its copy, too.
        copy_of(scope, param)


_autocast_init: Callable[..., None] = torch.autocast.__init__


def _init_autocast(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    # Torch has no autocast for the meta tensors of a dry run; to disable it there is harmless.
    if device_type == "meta" and (META_AS.type != "meta" or not enabled):
        device_type = "cpu" if META_AS.type == "meta" else META_AS.type
    _autocast_init(self, device_type, dtype, enabled, cache_enabled)


class _Recorded(_Intercepted):
    """Mode that notes for the rows of a plan which function the forward calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        record = self.scope.record
        assert record is not None
        outer = record.function
        record.function = outer or name_of(func).rpartition(".")[2]
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            record.function = outer


@contextmanager
def intercept(scope: AnyDraws) -> Iterator[AnyDraws]:
    """Make ``scope`` the current scope of this thread, and intercept its calls."""
    if not isinstance(scope, Scope):
        mode = Drawing(scope)
    else:
        mode = (_Intercepted if scope.record is None else _Recorded)(scope)
    register_copies()
    if isinstance(scope, Scope) and scope.placement.type != "meta":
        with enter_scope(scope), mode:
            yield scope
    else:
        with patched_autocast(), enter_scope(scope), mode:
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


@contextmanager
def patched_autocast() -> Iterator[None]:
    """Patch autocast, for which torch has no hook, while any thread is in a dry run."""
    global _open_count
    with _lock:
        _open_count += 1
        if _open_count == 1:
            torch.autocast.__init__ = _init_autocast
    try:
        yield
    finally:
        with _lock:
            _open_count -= 1
            if _open_count == 0:
                torch.autocast.__init__ = _autocast_init
