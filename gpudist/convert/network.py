"""Run a network's own forward on global tensors."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from gpudist.convert.blocks_in_state_dict import drop_hooks
from gpudist.convert.copies import require_equal_copies
from gpudist.convert.edits import follow, is_edit
from gpudist.convert.inputs import Entrance, add_note, names_by_place, tensors_by_name
from gpudist.convert.network_plan import NetworkPlan
from gpudist.convert.parameters import Parameters
from gpudist.errors import ConversionError
from gpudist.geometry.layout import broadcast, partial_sum
from gpudist.nn.parameters.replication import copies_of
from gpudist.sbp.copies import copy_of, require_copies
from gpudist.sbp.functions import dispatch_functions
from gpudist.sbp.global_parameter import GlobalParameter
from gpudist.sbp.global_spec import GlobalSpec, global_spec, spec_of, wrapped
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.interception import intercepted
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.scope import Scope, current_scope, entered, started
from gpudist.sbp.spectrum import computed
from gpudist.world.partition import CartesianPartition

_CONVERSION = "_gpudist_conversion"


class Conversion:
    """State of a converted network in addition to its modules.

    Attributes:
        P_x: partition of the inputs that are blocks.
        entrance: converts inputs to global tensors.
        scope: scope of the network's calls.
        outputs: specs of the global tensors that the last call returned.
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
        self.parameters = Parameters(self.P_x)

    def __deepcopy__(self, memo: Any) -> Conversion:
        # Paths and substitutes refer to modules of the original.
        entrance = Entrance(self.P_x, self.entrance.inputs)
        made = Conversion(entrance, *self.settings, self.replicate_parameters, self.local_buffers)
        made.parameters = copy.deepcopy(self.parameters, memo)
        return made

    def agree(self, network: torch.nn.Module) -> None:
        """Agree at the first call: on equal copies, and on the first rank's seed of random numbers.

        Raises:
            PlanMismatch: on every rank, if workers hold different parameters or buffers.
        """
        if not self.has_agreed:
            mine = int(torch.randint(1 << 62, ()).item())
            self.scope.seed = require_equal_copies(network, self.P_x, self.local_buffers, mine)
            self.has_agreed = True

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
        scope = started(self.scope)
        with entered(scope):
            args, kwargs = self.entered(function, args, kwargs)
        try:
            with _with_substitutes(network, self, scope), intercepted(scope):
                result = function(*args, **kwargs)
        # The user's network may raise any exception.
        except Exception as error:
            add_note(error, self.entrance.note_of(tensors_by_name(function, args, kwargs)))
            raise
        with entered(scope):
            left = self.left(result)
        self.outputs = without_wait(left)
        return left

    def entered(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the arguments of a method with blocks converted to global tensors."""
        names = names_by_place(function)
        holders, blocks = self.parameters.holders, 0
        wholes: list[tuple[str, torch.Tensor]] = []

        def enter(name: str, x: Any) -> Any:
            number = -1

            def one(leaf: Any) -> Any:
                nonlocal blocks, number
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                number += 1
                if self.entrance.is_held_by_all(name, leaf) and torch.is_grad_enabled():
                    (leaf,) = copies_of([leaf], [holders]) if leaf.requires_grad else (leaf,)
                if id(leaf) in self.parameters.aliases:
                    # The input itself, not the parameter that stands for it in closures.
                    leaf = leaf.view_as(leaf)
                leaf = self.entrance(name, leaf, number, is_first=not blocks)
                if isinstance(leaf, GlobalTensor):
                    blocks += 1
                    self.scope.seen(leaf.global_layout, leaf.element_size())
                else:
                    wholes.append((name, leaf))
                return leaf

            return tree_map(one, x, is_leaf=_is_size)

        entered = tuple(enter(names(i), x) for i, x in enumerate(args))
        others = {name: enter(name, x) for name, x in kwargs.items()}
        if wholes and not blocks:
            self.entrance.warn_unsplit(wholes, self.scope)
        return entered, others

    def left(self, result: Any) -> Any:
        """Return the result with plain tensors converted to copies on every worker."""

        # A repeated call has a scope of its own.
        scope = current_scope() or self.scope

        def leave(leaf: Any) -> Any:
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                return leaf
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if isinstance(leaf, OuterTensor):
                leaf = leaf.standing()
            leaf = copy_of(scope, leaf)
            require_copies(scope, "output", [leaf])
            if isinstance(leaf, GlobalTensor):
                return without_terms(computed(leaf))
            placement = self.entrance.placement
            copies = (broadcast,) * placement.axes
            local = leaf if placement.active else leaf.reshape(-1)[:0]
            how = global_spec(placement, copies, tuple(leaf.shape), leaf.dtype)
            return wrapped(GlobalTensor, local, how)

        return tree_map(leave, result, is_leaf=_is_size)


def paths_of(network: torch.nn.Module) -> Callable[[], dict[int, str]]:
    """Return a cached function that maps the identity of each module to its path.

    The function does not keep the network, which keeps the function.
    """
    weak = ref(network)

    def paths() -> dict[int, str]:
        found = weak()
        modules = () if found is None else found.named_modules()
        return {id(module): path for path, module in modules}

    return cache(paths)


def names_of(network: torch.nn.Module) -> Callable[[torch.Tensor, Any], str]:
    """Return a function that names a parameter, for which a copy may stand, or describes it."""
    weak = ref(network)

    def name_of(x: torch.Tensor, copy: Any) -> str:
        found = weak()
        for name, parameter in () if found is None else found.named_parameters():
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
    return x.to_global(sbp=tuple(broadcast if one == partial_sum else one for one in x.sbp))


def without_wait(outputs: Any) -> Any:
    """Return the specs of the outputs, nested alike, without references to tensors."""
    return tree_map(lambda y: spec_of(y) if isinstance(y, GlobalTensor) else None, outputs)


@contextmanager
def _with_substitutes(
    network: torch.nn.Module, conversion: Conversion, scope: Scope
) -> Iterator[None]:
    """Replace parameters by copies whose gradients are summed at the end of backward."""
    places = _places_of(network)
    sharded = conversion.parameters.sharded(network)
    parameters = conversion.parameters
    own = list({id(p): p for _, _, p in places if id(p) not in sharded}.values())
    own += parameters.unlisted
    made = zip(own, parameters.substitutes(own), strict=True)
    substitutes = {id(p): copy for p, copy in made if copy is not p}
    scope.substitutes = {**parameters.aliases, **substitutes}
    # FSDP2 sums the gradients of its parameters, which it makes during the call.
    scope.holders, scope.further, scope.leaves = parameters.holders, [], {}
    scope.learns = scope.holders is not None and torch.is_grad_enabled() and not sharded
    places = [place for place in places if id(place[2]) in substitutes]
    try:
        for module, name, parameter in places:
            copy = substitutes[id(parameter)]
            # Networks and their libraries ask whether they have a parameter.
            if type(copy) is torch.Tensor and type(parameter) in (Parameter, GlobalParameter):
                copy.__class__ = Parameter
            else:
                copy._is_param = True  # pyright: ignore
            module._parameters[name] = copy  # pyright: ignore
        yield
    finally:
        for module, name, parameter in places:
            # The forward may have replaced or deleted it.
            if module._parameters.get(name) is substitutes[id(parameter)]:
                module._parameters[name] = parameter


def _places_of(network: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Parameter]]:
    return [
        (module, name, parameter)
        for module in network.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


class Converted:
    """Mixin of the classes of converted networks."""

    @property
    def P_x(self) -> CartesianPartition:
        """Partition of the inputs that are blocks."""
        return conversion_of(self).P_x

    @property
    def P_y(self) -> Any:
        """Partitions of the outputs of the last call, nested like the outputs.

        Raises:
            ConversionError: the network has not been called yet.
        """
        outputs = conversion_of(self).outputs
        if outputs is None:
            raise ConversionError(
                "P_y depends on the shapes of the inputs, and the network has not been called "
                "yet; call it first, or use gpudist.plan_of(network, P_x, *shapes).outputs"
            )
        return tree_map(lambda y: None if y is None else _partition_of(y), outputs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies share P_x, which comes first and cannot be pickled: its error says what to save.
        make, args, *state = super().__reduce_ex__(protocol)
        return _remade, (self.P_x, make, args), *state


def _remade(P_x: CartesianPartition, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return make(*args)


def _partition_of(y: GlobalSpec) -> CartesianPartition:
    """Return the workers that hold the blocks of a tensor, or of its first copy."""
    shape, P = [1] * len(y.shape), y.placement.partition
    index: list[Any] = []
    order: list[int] = []
    for axis, one in enumerate(y.sbp):
        index.append(slice(None) if one.is_split else 0)
        if one.is_split:
            shape[one.dim] *= P.shape[axis]
            order.append(one.dim)
    ranks = y.placement.ranks[tuple(index)]
    ranks = ranks.transpose(sorted(range(len(order)), key=order.__getitem__)).flatten()
    members = P.world.create_partition_inclusive(ranks.tolist())
    return members.create_cartesian_topology_partition(shape)


def conversion_of(network: Any) -> Conversion:
    """Return the conversion of a converted network.

    Raises:
        ConversionError: the network was not converted.
    """
    found = getattr(network, "__dict__", {}).get(_CONVERSION)
    if found is None:
        raise ConversionError(
            f"{type(network).__name__} is not a converted network; convert it with "
            "gpudist.distribute"
        )
    return found


@cache
def converted_class(kind: type[torch.nn.Module], methods: tuple[str, ...]) -> type[Any]:
    """Return a subclass of ``kind`` whose ``methods`` take and return global tensors."""

    def entry(name: str) -> Any:
        original: Any = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return conversion_of(self)(self, original.__get__(self), args, kwargs)

        call.__name__, call.__doc__ = name, original.__doc__
        return call

    def call_network(self: Any, *args: Any, **kwargs: Any) -> Any:
        conversion = conversion_of(self)
        if current_scope() is not None:
            return kind.__call__(self, *args, **kwargs)
        return conversion(self, _Whole(kind, self), args, kwargs)

    entries = {name: entry(name) for name in methods if name != "forward"}
    if "forward" in methods:
        entries["__call__"] = call_network
    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, **entries}
    return type(f"Distributed{kind.__name__}", (Converted, kind), body)


class _Whole:
    """The call of a module as a function with the signature of its forward."""

    def __init__(self, kind: type[torch.nn.Module], network: torch.nn.Module) -> None:
        self.kind, self.network = kind, network
        self.__signature__ = inspect.signature(network.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.__call__(self.network, *args, **kwargs)


def names_of_entries(network: torch.nn.Module, methods: Sequence[str]) -> tuple[list[str], bool]:
    """Return the argument names of all methods, and whether any method takes arbitrary arguments.

    Raises:
        ConversionError: the network has no such method.
    """
    names: list[str] = []
    takes_any = False
    for method in methods:
        function = getattr(network, method, None)
        if not callable(function):
            raise ConversionError(
                f"distribute: methods={tuple(methods)}, but {type(network).__name__} has no "
                f"method {method!r}; name its own methods"
            )
        for name, one in inspect.signature(function).parameters.items():
            names.append(name)
            takes_any |= one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    return names, takes_any


def _refuse_outside(module: torch.nn.Module, args: Any) -> None:
    """Raise if a submodule is called with plain tensors from outside the network's own methods.

    Raises:
        ConversionError: no method of the network is running, and an argument is a plain tensor.
    """
    if current_scope() is None and any(type(x) is torch.Tensor for x in args):
        raise ConversionError(
            f"{type(module).__name__}: this module of a converted network was called with a plain "
            "tensor outside the network's own methods, so it would compute on this worker's "
            "block alone; name the method that calls it, distribute(..., methods=('forward', "
            "'encode')), or pass it a global tensor"
        )


def convert(
    network: torch.nn.Module,
    conversion: Conversion,
    methods: Sequence[str],
    plan: NetworkPlan,
    source: torch.nn.Module,
) -> Any:
    """Convert a network, a copy of ``source``, in place to take and return global tensors.

    Raises:
        ConversionError: the plan names a module that does not exist.
    """
    parameters = conversion.parameters = Parameters(conversion.P_x)
    parameters.follow_network(source, network)
    before = _places_of(network)
    parameters.split_weights = follow(plan, network, conversion.P_x)
    if parameters.split_weights or not conversion.replicate_parameters:
        parameters.make_global(network, conversion.replicate_parameters)
        parameters.replace([(old, module._parameters[name]) for module, name, old in before])
    network.__class__ = converted_class(type(network), tuple(methods))
    network.__dict__[_CONVERSION] = conversion
    for module in network.modules():
        if module is not network:
            module.register_forward_pre_hook(_refuse_outside, prepend=True)
    return network


def undone(network: Any) -> torch.nn.Module:
    """Revert a converted network to its original class, in place."""
    del network.__dict__[_CONVERSION]
    network.__class__ = type(network).__mro__[2]
    for module in network.modules():
        hooks = module._forward_pre_hooks
        for number in [i for i, hook in hooks.items() if hook is _refuse_outside or is_edit(hook)]:
            del hooks[number]
        drop_hooks(module)
    return network
