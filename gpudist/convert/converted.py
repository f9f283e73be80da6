"""Give a converted network a class whose methods take and return global tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpudist.convert.block_checkpoints import undo_plan
from gpudist.convert.blocks_in_state_dict import drop_hooks
from gpudist.convert.edits import Edits, is_edit
from gpudist.convert.kept import GUARD
from gpudist.convert.network import Conversion
from gpudist.convert.network_plan import NetworkPlan
from gpudist.convert.parameters import Exchange
from gpudist.errors import ConversionError
from gpudist.exchange.tracing import leave_untraced
from gpudist.sbp.global_spec import GlobalSpec
from gpudist.sbp.scope import current_scope
from gpudist.world.partition import CartesianPartition

_CONVERSION = "_gpudist_conversion"


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

    def extra_repr(self) -> str:
        """Return the text of the original class, followed by the partition of the inputs."""
        original: Any = super()
        return ", ".join(filter(None, [original.extra_repr(), f"P_x={self.P_x!r}"]))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # What calls have kept would hold the memory of the parameters as they were.
        conversion_of(self).forget()
        original: Any = super()
        return original._apply(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies share P_x, which comes first and cannot be pickled: its error says what to save.
        make, args, *state = super().__reduce_ex__(protocol)
        return _remake, (self.P_x, make, args), *state


_UNTRACED = (
    "torch.compile does not trace a converted network, and with fullgraph=False runs it as it is; "
    "gpudist.compiled(network) runs it as one compiled graph"
)


def _entry(method: Any) -> Any:
    """Return ``method`` as one that torch.compile can trace, up to the reason to go no further."""
    untraced = leave_untraced(_UNTRACED)(method)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return untraced(*args, **kwargs)

    return call


def _remake(P_x: CartesianPartition, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return make(*args)


def _partition_of(y: GlobalSpec) -> CartesianPartition:
    """Return the workers that hold the blocks of a tensor, or of its first copy."""
    shape, P = [1] * len(y.shape), y.placement.partition
    index: list[Any] = []
    order: list[int] = []
    for axis, attribute in enumerate(y.sbp):
        index.append(slice(None) if attribute.is_split else 0)
        if attribute.is_split:
            shape[attribute.dim] *= P.shape[axis]
            order.append(attribute.dim)
    ranks = y.placement.ranks[tuple(index)]
    ranks = ranks.transpose(sorted(range(len(order)), key=order.__getitem__)).flatten()
    members = P.world.create_partition_inclusive(ranks.tolist())
    return members.create_cartesian_topology_partition(shape)


def conversion_of(network: Any) -> Conversion:
    """Return the conversion of a converted network.

    Raises:
        ConversionError: the network was not converted.
    """
    conversion = getattr(network, "__dict__", {}).get(_CONVERSION)
    if conversion is None:
        raise ConversionError(
            f"{type(network).__name__} is not a converted network; convert it with "
            "gpudist.distribute"
        )
    return conversion


@cache
def make_converted_class(kind: type[torch.nn.Module], methods: tuple[str, ...]) -> type[Any]:
    """Return a subclass of ``kind`` whose ``methods`` take and return global tensors."""

    def entry(name: str) -> Any:
        original: Any = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return conversion_of(self)(self, original.__get__(self), args, kwargs)

        call.__name__, call.__doc__ = name, original.__doc__
        return _entry(call)

    def call_network(self: Any, *args: Any, **kwargs: Any) -> Any:
        # With the signature of the forward.
        whole: Any = partial(kind.__call__, self)
        whole.__wrapped__ = self.forward
        return conversion_of(self)(self, whole, args, kwargs)

    entries = {name: entry(name) for name in methods if name != "forward"}
    if "forward" in methods:
        entries["__call__"] = _entry(call_network)
    body = {"__module__": kind.__module__, "__doc__": kind.__doc__, **entries}
    return type(f"Distributed{kind.__name__}", (Converted, kind), body)


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
        for name, parameter in inspect.signature(function).parameters.items():
            names.append(name)
            takes_any |= parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return names, takes_any


def _refuse_outside(module: torch.nn.Module, args: Any) -> None:
    """Raise if a submodule is called with plain tensors from outside the network's own methods.

    Raises:
        ConversionError: no method of the network is running, and an argument is a plain tensor.
    """
    if current_scope() is None and any(type(x) is torch.Tensor for x in args):
        raise ConversionError(
            f"{type(module).__name__}: this module of a network, which gpudist.distribute has "
            "converted in place, was called with a plain tensor outside the network's own methods, "
            "so it would compute on this worker's block alone; name the method that calls it, "
            "distribute(..., methods=('forward', 'encode')), pass it a global tensor, or convert a "
            "copy.deepcopy of the network"
        )


def prepare(
    network: torch.nn.Module, conversion: Conversion, methods: Sequence[str], plan: NetworkPlan
) -> Callable[[], None]:
    """Return a function that converts a network in place; the network is as it was until then.

    Raises:
        ConversionError: the plan names a module that does not exist, or an edit or a parameter in
            parts is impossible.
    """
    parameters, edits = conversion.parameters, Edits(plan, network, conversion.P_x)
    kind = make_converted_class(type(network), tuple(methods))
    exchanges: list[Exchange] = []
    if edits.weights or not conversion.replicate_parameters:
        exchanges = parameters.exchanges(network, edits.weights, conversion.replicate_parameters)
    is_edited = plan.layouts or plan.weights or plan.recomputed
    conversion.plan_text = plan.to_text() if is_edited else ""
    conversion.scope.pins = edits.pins
    # One of several methods need not reach all of them.
    conversion.expects_pins = bool(plan.layouts) and len(methods) == 1

    def convert() -> None:
        if exchanges:
            parameters.make_global(edits.weights, exchanges)
        parameters.keep(network)
        edits.follow()
        network.__dict__[_CONVERSION] = conversion
        network.__class__ = kind
        for module in network.modules():
            if module is not network:
                module._forward_pre_hooks[GUARD] = _refuse_outside
                module._forward_pre_hooks.move_to_end(GUARD, last=False)  # pyright: ignore

    return convert


def undo_conversion(network: Any) -> Any:
    """Revert a converted network, and those within it, to the original classes, in place."""
    module: Any
    for module in network.modules():
        if issubclass(type(module), Converted):
            del module.__dict__[_CONVERSION]
            module.__class__ = type(module).__mro__[2]
        undo_plan(module)
        for hooks, with_kwargs in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        ):
            for number, hook in list(hooks.items()):
                if hook is _refuse_outside or is_edit(hook):
                    del hooks[number]
                    with_kwargs.pop(number, None)
        drop_hooks(module)
    return network
