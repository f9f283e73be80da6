"""Modules of a converted network, as its calls found them, kept as long as they are so.

A call compares what modules list with what they listed, in flat passes without a Python frame for
each: torch calls no hook where a dict of a module changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_, setitem
from typing import Any
from weakref import ref

import torch
from torch.nn import Parameter

from gpudist.convert.blocks_in_state_dict import keep_blocks
from gpudist.convert.parameters import Parameters
from gpudist.errors import ConversionError
from gpudist.exchange.tracing import is_eager
from gpudist.sbp.bound_forwards import BoundForwards
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.scope import Scope
from gpudist.sbp.setters import listed
from gpudist.sbp.spectrum import Spectrum

# Key of the hook that refuses calls from outside among a module's hooks; torch's are not negative.
GUARD = -1
_CHILDREN, _PARAMETERS, _BUFFERS, _HOOKS_BEFORE = (
    attrgetter(name) for name in ("_modules", "_parameters", "_buffers", "_forward_pre_hooks")
)
_NODE, _HOOKS, _RETAINS = (attrgetter(n) for n in ("grad_fn", "_backward_hooks", "retains_grad"))
# What the copies of a parameter depend on.
_FACTS: Sequence[Callable[[Any], Any]] = (
    type, attrgetter("requires_grad"), torch.Tensor.is_contiguous, attrgetter("dtype"),
    torch.Tensor.data_ptr, attrgetter("shape"),
)  # fmt: skip
_COMPUTED = frozenset({GlobalTensor, Spectrum, OuterTensor})


def _values(dicts: Sequence[dict[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


class Kept:
    """Modules of a network, and what they list, as one call found it.

    It refers to the network's modules, but not to the network, which refers to it.

    Attributes:
        parameters: parameters, each once, and tensors that only attributes hold.
        dicts, names, all_listed: where modules list parameters, or ``None``, and these.
        of_buffers: dicts of the modules' buffers.
        guarded: hooks of modules that refuse calls from outside.
        forwards: bound forwards of the modules.
    """

    def __init__(self, network: torch.nn.Module, parameters: Parameters, scope: Scope) -> None:
        modules = list(network.modules())
        self._inner = modules[1:]
        for module in modules:
            for name, x in module._parameters.items():
                if type(x) is GlobalTensor:
                    # It was made of global tensors between calls.
                    module._parameters[name] = listed(scope, x)
                elif isinstance(x, GlobalParameter) and "_placements" not in vars(module):
                    # It has got another name between calls.
                    keep_blocks(module)
        self._children, self._listed, self.of_buffers = (
            [*map(of, modules)] for of in (_CHILDREN, _PARAMETERS, _BUFFERS)
        )
        children = _values(self._children)
        # What ``holds`` finds before the parameters.
        self._before = [*self._children, *self._listed, *self.of_buffers, *children]
        self.all_listed = [*_values(self._listed)]
        self.names = [*chain.from_iterable(self._listed)]
        self.dicts = [d for d in self._listed for _ in d]
        distinct = {id(x): x for x in (*self.all_listed, *parameters.unlisted) if x is not None}
        self.parameters: list[Any] = [*distinct.values()]
        self.guarded = [h for h in map(_HOOKS_BEFORE, modules) if GUARD in h]
        self.forwards = BoundForwards(self._inner)
        self._facts: list[Any] = []
        self._nodes: list[Any] = []
        # What the last call returned that keeps copies.
        self._kept: tuple[dict[int, Any], dict[int, Any], list[Any]] = {}, {}, []

    def modules(self, network: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the network and its modules."""
        return [network, *self._inner]

    def holds(self, network: torch.nn.Module, tensors: Sequence[Any]) -> bool:
        """Return whether modules list what they listed, with ``tensors`` as parameters."""
        modules = self.modules(network)
        found = [
            *map(_CHILDREN, modules), *map(_PARAMETERS, modules), *map(_BUFFERS, modules),
            *_values(self._children), *_values(self._listed),
        ]  # fmt: skip
        those = [*self._before, *tensors]
        is_same = len(found) == len(those) and all(map(is_, found, those))
        return is_same and [*chain.from_iterable(self._listed)] == self.names

    def replaced(
        self, parameters: Parameters, sharded: set[int]
    ) -> tuple[dict[int, Any], dict[int, Any], list[Any]]:
        """Return substitutes and originals of a scope, and what modules are to list, if not these.

        Copies whose node sums gradients only are kept: it saves nothing, so that any number of
        backwards may pass it. Several forwards before a backward share it, and its messages.
        """
        is_kept = not (sharded or parameters.has_global) and torch.is_grad_enabled() and is_eager()
        facts: list[Any] = []
        if is_kept:
            with torch._C.DisableTorchFunction():
                facts += [x for of in _FACTS for x in map(of, self.parameters)]
                if parameters.P_x.wire.device.type == "cuda":
                    # Nodes of copies, and those that accumulate gradients, run on its stream.
                    facts.append(torch.cuda.current_stream())
                copies = self._kept[0].values()
                is_same = facts == self._facts and all(map(is_, map(_NODE, copies), self._nodes))
                if is_same and not any(map(_HOOKS, copies)) and not any(map(_RETAINS, copies)):
                    substitutes, originals, tensors = self._kept
                    return substitutes.copy(), originals.copy(), tensors
            # Nodes that accumulate gradients live as long as copies do; new ones have this stream.
            self._kept, copies = ({}, {}, []), ()
        used = [p for p in self.parameters if id(p) not in sharded]
        pairs = zip(used, parameters.substitutes(used), strict=True)
        pairs = [(parameter, copy) for parameter, copy in pairs if copy is not parameter]
        for parameter, copy in pairs:
            # Networks and their libraries see parameters in the copies.
            if type(copy) is torch.Tensor and type(parameter) in (Parameter, GlobalParameter):
                copy.__class__ = Parameter
            else:
                copy._is_param = True
        substitutes, originals = {id(p): c for p, c in pairs}, {id(c): p for p, c in pairs}
        tensors = [substitutes.get(id(x), x) for x in self.all_listed] if pairs else []
        if is_kept:
            self._facts, self._nodes = facts, [*map(_NODE, substitutes.values())]
            self._kept = substitutes.copy(), originals.copy(), tensors
        return substitutes, originals, tensors


@contextmanager
def modules_in_call(
    network: torch.nn.Module, kept: Kept, parameters: Parameters, scope: Scope
) -> Iterator[None]:
    """Let modules hold what they need during a call of their network.

    These are copies of parameters, whose gradients are summed at the end of backward, and bound
    forwards, and no guards: without hooks, modules take torch's fast path.
    """
    tensors, sharded = list[Any](), set[int]()
    scope.substitutes, scope.originals = {}, {}
    if parameters.may_be_replaced():
        sharded = parameters.identities_of_shards(kept.modules(network))
        scope.substitutes, scope.originals, tensors = kept.replaced(parameters, sharded)
    # FSDP2 sums the gradients of its parameters, which it makes during the call.
    scope.holders, scope.leaves = parameters.holders, {}
    scope.learns = scope.holders is not None and torch.is_grad_enabled() and not sharded
    guards = [*map(OrderedDict.pop, kept.guarded, repeat(GUARD), repeat(None))]
    forwards, is_complete = kept.forwards.put_in(), False
    if tensors:
        _set(kept.dicts, kept.names, tensors)
    try:
        yield
        is_complete = True
    finally:
        kept.forwards.take_out(forwards)
        is_alone = None not in guards and not any(map(len, kept.guarded))
        for hooks, guard in () if is_alone else zip(kept.guarded, guards, strict=True):
            if guard is not None:
                hooks[GUARD] = guard
                hooks.move_to_end(GUARD, last=False)
        if is_alone:
            _set(kept.guarded, repeat(GUARD), guards)
        buffers = [*_values(kept.of_buffers)]
        if (
            kept.holds(network, tensors or kept.all_listed)
            and _COMPUTED.isdisjoint(map(type, buffers))
            and scope.originals.keys().isdisjoint(map(id, buffers))
        ):
            if tensors:
                _set(kept.dicts, kept.names, kept.all_listed)
        else:
            _leave_modules(network, kept, scope, is_complete)


def _leave_modules(network: torch.nn.Module, kept: Kept, scope: Scope, is_complete: bool) -> None:
    """Let modules list what those of the sequential network would: no copies, full buffers.

    After an error, which may be that of one rank alone, nothing is gathered.

    Raises:
        ConversionError: the forward has replaced a parameter that workers hold in parts.
    """
    originals, left = scope.originals, list[tuple[dict[str, Any], str, Any]]()
    for module in dict.fromkeys([*network.modules(), *kept.modules(network)]):
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if id(x) in originals:
                    # The forward may have moved it to another module.
                    tensors[name] = originals[id(x)]  # pyright: ignore
                    is_in_parts = isinstance(tensors[name], GlobalParameter)
                    if is_in_parts and "_placements" not in vars(module):
                        keep_blocks(module)
                elif type(x) in _COMPUTED:
                    left.append((tensors, name, x))
    places = zip(kept.dicts, kept.names, kept.all_listed, strict=True)
    replaced = [
        place
        for place in places
        if isinstance(place[2], GlobalParameter)
        and place[0].get(place[1], place[2]) is not place[2]
    ]
    for tensors, name, parameter in replaced:
        tensors[name] = parameter
    if not is_complete:
        return
    if replaced:
        raise ConversionError(
            f"the forward has replaced the parameters {[name for _, name, _ in replaced]}, of "
            "which each worker holds its part; assign their data, parameter.data = value, or "
            "change them in place"
        )
    known: dict[int, Any] = {}
    for tensors, name, x in left:
        if id(x) not in known:
            known[id(x)] = listed(scope, x)
        tensors[name] = known[id(x)]


def _set(dicts: Sequence[dict[Any, Any]], keys: Iterable[Any], values: Sequence[Any]) -> None:
    for _ in map(setitem, dicts, keys, values):
        pass


def paths_of(network: torch.nn.Module) -> Callable[[], dict[int, str]]:
    """Return a cached function that maps the identity of each module to its path.

    The function does not keep the network, which keeps the function.
    """
    weak, by_id = ref(network), dict[int, str]()

    def paths() -> dict[int, str]:
        module = None if by_id else weak()
        if module is not None:
            by_id.update((id(m), path) for path, m in module.named_modules())
        return by_id

    return paths


def names_of(network: torch.nn.Module) -> Callable[[torch.Tensor, Any], str]:
    """Return a function that names a parameter, for which a copy may stand, or describes it."""
    weak = ref(network)

    def name_of(x: torch.Tensor, copy: Any) -> str:
        network_now = weak()
        for name, parameter in () if network_now is None else network_now.named_parameters():
            if parameter is x or parameter is copy:
                return repr(name)
        return f"of shape {list(x.shape)} that the network does not list"

    return name_of
