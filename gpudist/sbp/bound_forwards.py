"""Forwards of torch's own leaf modules, bound to the layouts that they were called with.

A converted network's modules hold these forwards during its calls only, as they hold the copies of
parameters: no copy, pickle or state of a module has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_, itemgetter
from types import MethodType, NoneType
from typing import Any, NamedTuple

import torch

from gpudist.cache import Cache
from gpudist.sbp import views
from gpudist.sbp.bound_call import BoundCall
from gpudist.sbp.call_cache import bind_forward
from gpudist.sbp.done import done
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.scope import scopes

_any_autocast: Any = torch._C._is_any_autocast_enabled  # pyright: ignore
_count_modes: Any = torch._C._len_torch_function_stack  # pyright: ignore
_transforms_active: Any = torch._C._are_functorch_transforms_active  # pyright: ignore
# Modes see even the question for a dtype.
_without_modes: Any = torch._C.DisableTorchFunction
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_SIMPLE = frozenset({int, float, bool, str, tuple, torch.Size, NoneType})
_BatchNorm = torch.nn.modules.batchnorm._BatchNorm  # pyright: ignore


class HeldTensor(NamedTuple):
    """Where a module keeps a tensor, and what the tensor was when the forward was bound.

    Attributes:
        held: the module's parameters or buffers.
        name: name of the tensor among these.
        fact: spec of a global tensor, dtype and shape of a plain one, ``None`` for none.
    """

    held: dict[str, Any]
    name: str
    fact: object


_Bound = tuple[Any, Sequence[HeldTensor], BoundCall | None, Sequence[bytes]]


class BoundForward:
    """The forward of one module, which binds itself at the first call with a spec.

    Whatever is not as it was then takes the way of the module's class.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.kind = module, type(module)
        self.through = MethodType(self.kind.forward, module)
        self._attributes = module.__dict__
        self._names = _public(module)
        self._facts_of = itemgetter("training", *self._names)
        # A bound call by spec, with the attributes it was bound with; ``None`` if there is none.
        self._bound = Cache[Any, _Bound](16)
        self._counts = isinstance(module, _BatchNorm)

    def __reduce__(self) -> Any:
        # A forward may copy its modules; see ``_set_state``.
        return BoundForward, (self.module,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        opened = scopes.open
        scope: Any = opened[-1] if opened else None
        if scope is None or not scope.binds or kwargs or not args or args[1:]:
            return self.through(*args, **kwargs)
        x = args[0]
        if type(x) is not GlobalTensor:
            return self.through(x)
        key: Any = x._global_spec
        if _any_autocast():
            on = key.placement.autocast
            key = key, on and torch.get_autocast_dtype(on)
        bound = self._bound.get(key)
        attributes = self._attributes
        try:
            # A further attribute may replace a method.
            facts = self._facts_of(attributes), len(attributes)
            is_same = bound is not None and facts == bound[0]
        except Exception:  # One is gone, or is a tensor now.
            is_same = False
        if (
            _transforms_active()
            or _count_modes() > scope.modes
            or (scope.fresh and id(x) in scope.fresh)
        ):
            return self.through(x)
        if bound is None or not is_same:
            return self._bind(key, x, scope)
        _, places, call, parts = bound
        if call is None:
            return self.through(x)
        with _without_modes():
            local = [x._local]
            for held, name, fact in places:
                w: Any = held[name] if name in held else None  # noqa: SIM401
                if type(w) is GlobalTensor:
                    if w._global_spec is not fact:
                        break
                    local += (w._local,)
                elif w is None or fact is None:
                    if w is not fact:
                        break
                elif (
                    type(w) not in _PLAIN
                    or (w.dtype, w.shape) != fact
                    # Copies are parameters, and no leaves.
                    or (scope.learns and w.requires_grad and (w.is_leaf or type(w) is torch.Tensor))
                ):
                    break
                else:
                    local += (w,)
            else:
                is_change = call.result is None and views.copies_of_memory and views.concerns(x)
                if not is_change:
                    module = self.module
                    if self._counts and module.training and module.track_running_stats:
                        count = module._buffers["num_batches_tracked"]
                        if count is not None:
                            count.add_(1)
                    if done.parts is not None:
                        done.parts += parts
                    return call(GlobalTensor, local, self.through, (x,), {})
        return self.through(x)

    def _bind(self, key: Any, x: GlobalTensor, scope: Any) -> Any:
        module, counts = self.module, dict(scope.calls)
        values = [*map(self._attributes.get, self._names)]
        is_simple = _SIMPLE.issuperset(map(type, values))
        own, absent = dict[int, HeldTensor](), list[HeldTensor]()
        for held in (module._parameters, module._buffers):
            for name, w in held.items():
                if w is None:
                    absent.append(HeldTensor(held, name, None))
                else:
                    spec = getattr(w, "_global_spec", None)
                    own[id(w)] = HeldTensor(held, name, spec or (w.dtype, w.shape))
        y, call, others, parts = bind_forward(self.through, x, own)
        if call is not None and not (
            # What a plan prescribes for functions, and a result of another argument.
            scope.calls == counts
            and call.operator.base in (None, 0)
            and is_simple
            and not any(callable(value) and value is not self for value in vars(module).values())
            and getattr(module, "max_norm", None) is None
            and not (self._counts and module.momentum is None)
        ):
            call = None
        attributes = self._attributes
        is_simple = is_simple and attributes.keys() >= {*self._names}
        known = (self._facts_of(attributes), len(attributes)) if is_simple else None
        self._bound[key] = known, [*absent, *[own[id(w)] for w in others]], call, parts
        return y


def _public(module: torch.nn.Module) -> list[str]:
    return [name for name in vars(module) if name[0] != "_"]


_set_state_of_torch: Any = torch.nn.Module.__setstate__


def _set_state(self: Any, state: dict[str, Any]) -> None:
    # Of a copy that a forward has made, also of a shallow one.
    own = {name: value for name, value in state.items() if type(value) is not BoundForward}
    _set_state_of_torch(self, own)


class BoundForwards:
    """The forwards that modules hold during calls of their network."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        if torch.nn.Module.__setstate__ is not _set_state:
            torch.nn.Module.__setstate__ = _set_state
        self._bound = [
            BoundForward(module)
            for module in modules
            if type(module).__module__.startswith("torch.nn.modules.")
            and not (module._modules or "forward" in vars(module))
            and all(type(vars(module)[name]) in _SIMPLE for name in _public(module))
        ]
        self._owners = [bound.module for bound in self._bound]
        self._dicts = [vars(module) for module in self._owners]
        self._kinds = [bound.kind for bound in self._bound]
        self._functions = {bound.kind: bound.through.__func__ for bound in self._bound}

    def put_in(self) -> Sequence[BoundForward]:
        """Let modules that have the forwards of their classes hold these; return those put in."""
        is_usual = (
            all(map(is_, map(type, self._owners), self._kinds))
            and not any(map(dict.__contains__, self._dicts, repeat("forward")))
            and all([kind.forward is function for kind, function in self._functions.items()])
        )
        put: Sequence[BoundForward] = self._bound if is_usual else ()
        for _ in map(dict.__setitem__, self._dicts, repeat("forward"), put):
            pass
        return put

    def take_out(self, put: Sequence[BoundForward]) -> None:
        """Undo :meth:`put_in`, unless a module has got another forward."""
        for d, bound in zip(self._dicts, put, strict=False):
            if "forward" in d and d["forward"] is bound:
                del d["forward"]
