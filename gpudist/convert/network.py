"""Run a network's own forward on global tensors."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from gpudist.cache import Cache
from gpudist.convert.blocks_in_state_dict import keep_blocks
from gpudist.convert.copies import require_equal_copies
from gpudist.convert.given import Given
from gpudist.convert.inputs import Entrance, add_note, leaves_by_name, names_by_place
from gpudist.convert.parameters import Parameters
from gpudist.errors import ConversionError
from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.parameters.replication import copies_of
from gpudist.sbp.copies import copy_of, require_copies
from gpudist.sbp.dispatch import refusal_of_transforms
from gpudist.sbp.done import done
from gpudist.sbp.functions import dispatch_functions
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.sbp.global_spec import GlobalSpec, spec_of, wrap_copies
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.interception import intercept
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.scope import Scope, current_scope, enter_scope, path_of_error, start_call
from gpudist.sbp.setters import listed
from gpudist.sbp.spectrum import Spectrum, compute_spectrum

# Key of the hook that refuses calls from outside among a module's hooks; torch's are not negative.
GUARD = -1
_Place = tuple[torch.nn.Module, str, Parameter]


class Conversion:
    """State of a converted network in addition to its modules.

    Attributes:
        P_x: partition of the inputs that are blocks.
        entrance: converts inputs to global tensors.
        scope: scope of the network's calls.
        outputs: specs of the global tensors that the last call returned.
        plan_text: the edits that the network follows, which ranks compare at the first call.
        expects_pins: whether the next call is to reach all pins.
    """

    def __init__(
        self,
        entrance: Entrance,
        unknown: Any,
        gather_limit_bytes: int | None,
        replicate_parameters: bool,
        local_buffers: Sequence[str] = (),
    ) -> None:
        # Before a function, such as reentrant checkpointing, whose forward calls the network.
        dispatch_functions()
        self.entrance = entrance
        self.P_x = entrance.P_x
        self.replicate_parameters = replicate_parameters
        self.settings = unknown, gather_limit_bytes
        self.scope = Scope(
            entrance.placement,
            tuple(entrance.axes),
            self.P_x.dim,
            unknown=unknown,
            gather_limit_bytes=gather_limit_bytes,
        )
        self.local_buffers = tuple(local_buffers)
        self.has_agreed = False
        self.outputs: Any = None
        self.plan_text = ""
        self.expects_pins = False
        self.parameters = Parameters(self.P_x)
        self.compared = Given(entrance, self.settings)
        # Specs of inputs that the scope has seen.
        self._specs = Cache[GlobalSpec, bool](1024)
        self._guards: list[Any] | None = None

    def __deepcopy__(self, memo: Any) -> Conversion:
        # Paths and substitutes refer to modules of the original.
        entrance = Entrance(self.P_x, self.entrance.inputs)
        conversion = Conversion(
            entrance, *self.settings, self.replicate_parameters, self.local_buffers
        )
        conversion.parameters = copy.deepcopy(self.parameters, memo)
        conversion.plan_text, conversion.scope.pins = self.plan_text, self.scope.pins
        conversion.expects_pins = self.expects_pins
        return conversion

    @property
    def has_blocks(self) -> bool:
        """Whether parameters are held in parts, or a plan changes modules."""
        return bool(self.plan_text) or not self.replicate_parameters

    def guards_of(self, network: torch.nn.Module) -> list[Any]:
        """Return the hooks of the modules that refuse calls from outside the network's methods."""
        if self._guards is None:
            hooks = [module._forward_pre_hooks for module in modules_of(network)]
            self._guards = [
                hooks_of_module for hooks_of_module in hooks if GUARD in hooks_of_module
            ]
        return self._guards

    def agree(self, network: torch.nn.Module) -> None:
        """Agree at the first call: on equal copies, and on the first rank's seed of random numbers.

        Under ``GPUDIST_CHECK=1``, workers compare their copies at every call.

        Raises:
            PlanMismatch: on every rank, if workers hold different parameters or buffers.
            ShapeError: within a transform of ``torch.func``, where nothing can be compared.
        """
        if not self.has_agreed:
            if torch._C._are_functorch_transforms_active():  # pyright: ignore
                raise refusal_of_transforms(f"the first call of a {type(network).__name__}")
            # A checkpoint may have given it.
            mine = self.scope.seed or int(torch.randint(1 << 62, ()).item())
            self.scope.seed = require_equal_copies(
                network, self.P_x, self.local_buffers, mine, self.plan_text
            )
            self.compared.name_network(network)
            self.has_agreed = True
        elif self.P_x.wire.compares_every_call and self.P_x.active:
            require_equal_copies(network, self.P_x, self.local_buffers, P_all=self.P_x)

    def __call__(
        self,
        network: torch.nn.Module,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call ``function``, a method of the network, on global tensors."""
        if current_scope() is not None:
            return function(*args, **kwargs)
        self.agree(network)
        self.scope.paths, self.scope.name_of = paths_of(network), names_of(network)
        scope = start_call(self.scope)
        parts = self.compared.inputs(function, args, kwargs)
        with enter_scope(scope):
            args, kwargs = self.enter_arguments(function, args, kwargs)
        outer, done.parts = done.parts, parts
        try:
            with _with_substitutes(network, self, scope), intercept(scope):
                result = function(*args, **kwargs)
        # The user's network may raise any exception.
        except Exception as error:
            leaves = leaves_by_name(function, args, kwargs)
            add_note(error, [path_of_error(scope, error), *self.entrance.notes_of(leaves, error)])
            raise
        finally:
            done.parts = outer
        if parts is not None:
            self.compared.fold("functions", [*parts, b"%d draws" % scope.draws])
        with enter_scope(scope):
            left = self.leave_results(result)
        self.outputs = without_wait(left)
        if self.expects_pins:
            self.require_pins(scope)
        return left

    def require_pins(self, scope: Scope) -> None:
        """Warn once, on the first worker, of layouts that no call has got."""
        self.expects_pins = False
        missed = [] if scope.pins is None else scope.pins.unreached(scope.calls)
        if missed and self.P_x.rank == 0:
            warnings.warn(f"plan: layouts that are not used: {'; '.join(missed)}", stacklevel=2)

    def enter_arguments(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the arguments of a method with blocks converted to global tensors."""
        names = names_by_place(function)
        holders, blocks = self.parameters.holders, 0
        wholes: list[tuple[str, torch.Tensor]] = []

        def enter(name: str, x: Any) -> Any:
            number = -1

            def enter_leaf(leaf: Any) -> Any:
                nonlocal blocks, number
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                number += 1
                if self.entrance.is_held_by_all(name, leaf) and torch.is_grad_enabled():
                    (leaf,) = copies_of([leaf], [holders]) if leaf.requires_grad else (leaf,)
                leaf = self.entrance(name, leaf, number, is_first=not blocks)
                if isinstance(leaf, GlobalTensor):
                    blocks += 1
                    spec = spec_of(leaf)
                    if spec not in self._specs:
                        self._specs[spec] = True
                        self.scope.note_block(spec.layout, spec.dtype.itemsize)
                else:
                    wholes.append((name, leaf))
                return leaf

            return (
                enter_leaf(x)
                if isinstance(x, torch.Tensor)
                else tree_map(enter_leaf, x, is_leaf=_is_size)
            )

        entered = tuple(enter(names(i), x) for i, x in enumerate(args))
        others = {name: enter(name, x) for name, x in kwargs.items()}
        if wholes and not blocks:
            self.entrance.warn_unsplit(wholes, self.scope)
        return entered, others

    def leave_results(self, result: Any) -> Any:
        """Return the result with plain tensors converted to copies on every worker."""

        # A repeated call has a scope of its own.
        scope = current_scope() or self.scope

        def leave(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or dataclasses.is_dataclass(leaf):
                return leaf
            if isinstance(leaf, OuterTensor):
                leaf = leaf.materialize()
            leaf = copy_of(scope, leaf)
            require_copies(scope, "output", [leaf])
            if isinstance(leaf, GlobalTensor):
                return without_terms(compute_spectrum(leaf))
            return wrap_copies(GlobalTensor, leaf, self.entrance.placement)

        if isinstance(result, torch.Tensor):
            return leave(result)
        return tree_map(leave, result, is_leaf=_is_size)


def paths_of(network: torch.nn.Module) -> Callable[[], dict[int, str]]:
    """Return a cached function that maps the identity of each module to its path.

    The function does not keep the network, which keeps the function.
    """
    weak, by_id = ref(network), dict[int, str]()

    def paths() -> dict[int, str]:
        # As torch's named_modules, without a generator for each module.
        left: list[tuple[str, torch.nn.Module | None]] = [] if by_id else [("", weak())]
        while left:
            path, module = left.pop()
            if module is not None and id(module) not in by_id:
                by_id[id(module)] = path
                before = f"{path}." if path else ""
                left += [(before + name, m) for name, m in reversed(module._modules.items())]
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


def _is_size(x: Any) -> bool:
    # torch's tree_map converts it to a tuple.
    return isinstance(x, torch.Size)


def without_terms(x: GlobalTensor) -> GlobalTensor:
    """Sum the terms of ``x``, so that only blocks and copies remain."""
    if partial_sum not in x.sbp:
        return x
    return x.to_global(
        sbp=tuple(broadcast if attribute == partial_sum else attribute for attribute in x.sbp)
    )


def without_wait(outputs: Any) -> Any:
    """Return the specs of the outputs, nested alike, without references to tensors."""
    if isinstance(outputs, GlobalTensor):
        return spec_of(outputs)
    return tree_map(lambda y: spec_of(y) if isinstance(y, GlobalTensor) else None, outputs)


@contextmanager
def _with_substitutes(
    network: torch.nn.Module, conversion: Conversion, scope: Scope
) -> Iterator[None]:
    """Replace parameters by copies whose gradients are summed at the end of backward."""
    parameters = conversion.parameters
    places: list[_Place] = []
    sharded: set[int] = set()
    scope.substitutes, scope.originals = {}, {}
    if parameters.may_be_replaced():
        modules = modules_of(network)
        places, sharded = places_in(modules, scope), parameters.identities_of_shards(modules)
        by_id: dict[int, Any] = {id(p): p for _, _, p in places if id(p) not in sharded}
        by_id |= zip(map(id, parameters.unlisted), parameters.unlisted, strict=True)
        copies = parameters.substitutes(list(by_id.values()))
        substitutes = scope.substitutes = {
            id(p): c for p, c in zip(by_id.values(), copies, strict=True) if c is not p
        }
        scope.originals = dict(
            zip(map(id, substitutes.values()), map(by_id.__getitem__, substitutes), strict=True)
        )
    # FSDP2 sums the gradients of its parameters, which it makes during the call.
    scope.holders, scope.leaves = parameters.holders, {}
    scope.learns = scope.holders is not None and torch.is_grad_enabled() and not sharded
    places = [place for place in places if id(place[2]) in scope.substitutes]
    # Modules without hooks take torch's fast path; within a call, these have nothing to refuse.
    guarded = [hooks for hooks in conversion.guards_of(network) if GUARD in hooks]
    guards = [hooks.pop(GUARD) for hooks in guarded]
    is_complete = False
    try:
        for module, name, parameter in places:
            copy = scope.substitutes[id(parameter)]
            # Networks and their libraries ask whether they have a parameter.
            if type(copy) is torch.Tensor and type(parameter) in (Parameter, GlobalParameter):
                copy.__class__ = Parameter
            else:
                copy._is_param = True  # pyright: ignore
            module._parameters[name] = copy  # pyright: ignore
        yield
        is_complete = True
    finally:
        for hooks, guard in zip(guarded, guards, strict=True):
            hooks[GUARD] = guard
            if len(hooks) > 1:
                hooks.move_to_end(GUARD, last=False)
        _leave_modules(network, scope, places, is_complete)


def _leave_modules(
    network: torch.nn.Module,
    scope: Scope,
    places: Sequence[_Place],
    is_complete: bool,
) -> None:
    """Let modules list what those of the sequential network would: no copies, and full buffers.

    After an error, which may be that of one rank alone, nothing is gathered.

    Raises:
        ConversionError: the forward has replaced a parameter that workers hold in parts.
    """
    originals, left = scope.originals, list[tuple[dict[str, Any], str, Any]]()
    for module in dict.fromkeys([*modules_of(network), *map(itemgetter(0), places)]):
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if id(x) in originals:
                    # The forward may have moved it to another module.
                    tensors[name] = originals[id(x)]  # pyright: ignore
                    is_in_parts = isinstance(tensors[name], GlobalParameter)
                    if is_in_parts and "_placements" not in vars(module):
                        keep_blocks(module)
                elif type(x) in (GlobalTensor, Spectrum, OuterTensor):
                    left.append((tensors, name, x))
    replaced = [
        (module, name, parameter)
        for module, name, parameter in places
        if isinstance(parameter, GlobalParameter)
        and module._parameters.get(name, parameter) is not parameter
    ]
    for module, name, parameter in replaced:
        module._parameters[name] = parameter
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


def places_in(modules: Sequence[torch.nn.Module], scope: Scope) -> list[_Place]:
    """Return each parameter with the module that lists it and its name there.

    Those that were made of global tensors between calls become plain.
    """
    return [
        (module, name, listed(scope, parameter) if type(parameter) is GlobalTensor else parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def modules_of(network: torch.nn.Module) -> list[torch.nn.Module]:
    """Return ``list(network.modules())``, without a generator for each module."""
    by_id: dict[int, torch.nn.Module] = {}
    left: list[torch.nn.Module | None] = [network]
    while left:
        module = left.pop()
        if module is not None and id(module) not in by_id:
            by_id[id(module)] = module
            left += reversed(module._modules.values())
    return list(by_id.values())
