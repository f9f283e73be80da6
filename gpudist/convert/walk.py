"""The walk over a tree of modules: along the graph of every forward, from the root down."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from gpudist.convert.functions import DROPOUTS, FUNCTIONS, METHODS, Call, flattened
from gpudist.convert.inserted import DistributedPReLU, SharedParameter, SpreadPooled
from gpudist.convert.layers import LAYERS, POINT_WISE_LAYERS, output_partition
from gpudist.convert.plan import Plan, Row
from gpudist.convert.point_wise import (
    POINT_WISE_FUNCTIONS,
    POINT_WISE_METHODS,
    point_wise_output,
)
from gpudist.convert.trace import line_of, remedy, traced
from gpudist.convert.values import Pooled, Whole, depends_on_tensors
from gpudist.convert.weights import copy_weights
from gpudist.errors import ConversionError, GpudistError
from gpudist.partition import CartesianPartition


class Walk:
    """Converts the modules of one tree, which it changes, and writes down what it does.

    Args:
        wanted: the user's plan.

    Attributes:
        plan: what was done.
    """

    def __init__(self, wanted: Plan) -> None:
        self._wanted = wanted
        self.plan = Plan(trusted=set(wanted.trusted))
        self._done: dict[int, tuple[torch.nn.Module, str, list[Any], torch.nn.Module, Any]] = {}

    def convert(
        self, module: torch.nn.Module, path: str, *args: Any, **kwargs: Any
    ) -> tuple[torch.nn.Module, Any]:
        """What becomes of a module, and the value of its output.

        Args:
            module: of the tree.
            path: its name.
            args, kwargs: values it is called with.

        Raises:
            ConversionError: it cannot be converted; names the path.
        """
        given = [*args, *sorted(kwargs.items())]
        if id(module) in self._done:
            original, first, earlier, converted, output = self._done[id(module)]
            if type(original) in POINT_WISE_LAYERS:
                return original, _only_tensor(path, args, kwargs)
            if type(original) in LAYERS and not list(original.parameters()):
                # It agrees on one shape: calls have a layer each.
                return self._converted(original, path, args, kwargs)
            if earlier != given or [*map(type, earlier)] != [*map(type, given)]:
                raise _refusal(
                    path,
                    f"called with {given}, but as {first!r} with {earlier}; give each call "
                    "a module of its own",
                )
            return converted, output
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise _refusal(path, "it has hooks; register them after the conversion")
        converted, output = self._converted(module, path, args, kwargs)
        # Shared modules are found again as they are and as they have become. The entry keeps them,
        # so that their identities are not given to others.
        entry = (module, path, given, converted, output)
        self._done[id(module)] = self._done[id(converted)] = entry
        return converted, output

    def _converted(
        self, module: torch.nn.Module, path: str, args: Any, kwargs: Any
    ) -> tuple[torch.nn.Module, Any]:
        kind = type(module)
        if path in self._wanted.trusted:
            return self._trusted(module, path, args, kwargs)
        if kind in POINT_WISE_LAYERS:
            P_x = _only_tensor(path, args, kwargs)
            self._note(path, kind.__name__, P_x, P_x)
            return module, P_x
        if kind in LAYERS or kind in (torch.nn.PReLU, torch.nn.Flatten):
            return self._layer(module, path, _only_tensor(path, args, kwargs))
        if kind.__module__.startswith("torch.nn.") and kind is not torch.nn.Sequential:
            raise _refusal(path, f"torch.nn.{kind.__name__} is not supported")
        return self._user_defined(module, path, args, kwargs)

    def _layer(
        self, layer: torch.nn.Module, path: str, P_x: CartesianPartition
    ) -> tuple[torch.nn.Module, CartesianPartition]:
        call = Call(None, self._wanted.repartition_of(path))
        if call.grid is not None and not isinstance(layer, torch.nn.Flatten):
            raise _refusal(path, "the plan repartitions where nothing is flattened")
        try:
            if isinstance(layer, torch.nn.Flatten):
                P_y = flattened(call, P_x, layer.start_dim, layer.end_dim)
                new = call.module or layer
            elif isinstance(layer, torch.nn.PReLU):
                point_wise_output([P_x, Whole((layer.num_parameters, *(1,) * (P_x.dim - 2)), True)])
                new, P_y = DistributedPReLU(P_x, layer), P_x
            elif getattr(layer, "return_indices", False):
                raise ConversionError("return_indices is not supported")
            else:
                new = LAYERS[type(layer)](layer, P_x)
                P_y = output_partition(layer, P_x)
        except GpudistError as error:
            raise _refusal(path, f"{error}") from error
        copy_weights(layer, new)
        self._note(path, _becomes(type(layer).__name__, new), P_x, P_y, call)
        return new.train(layer.training), P_y

    def _trusted(
        self, module: torch.nn.Module, path: str, args: Any, kwargs: Any
    ) -> tuple[torch.nn.Module, Any]:
        """A module whose forward is kept, unseen; its children have the partition of its input."""
        if next(module.parameters(recurse=False), None) is not None:
            raise _refusal(
                path,
                "a trusted module may not have parameters of its own, whose gradients "
                "would not be summed over the workers",
            )
        P_x = _only_tensor(path, args, kwargs)
        self._note(path, f"{type(module).__name__} (trusted)", P_x, P_x)
        for name, child in module.named_children():
            setattr(module, name, self._below_trusted(child, f"{path}.{name}", P_x))
        return module, P_x

    def _below_trusted(
        self, child: torch.nn.Module, path: str, P_x: CartesianPartition
    ) -> torch.nn.Module:
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            for name, grandchild in child.named_children():
                child._modules[name] = self._below_trusted(grandchild, f"{path}.{name}", P_x)
            return child
        return self.convert(child, path, P_x)[0]

    def _user_defined(
        self, module: torch.nn.Module, path: str, args: Any, kwargs: Any
    ) -> tuple[torch.nn.Module, Any]:
        """A module with a forward of its own: kept if that is right on blocks, else its graph."""
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise _refusal(path, f"{error}") from error
        graph = traced(module, path, _where(path), depends_on_tensors, bound.arguments)
        forward = _Forward(self, module, path, graph)
        output = forward.follow(list(bound.arguments.values()))
        return forward.converted(), output

    def has_made(self, module: torch.nn.Module) -> bool:
        """Whether ``module`` is what another one has become."""
        return id(module) in self._done and self._done[id(module)][0] is not module

    def note_call(self, path: str, name: str, P_x: Any, P_y: Any, call: Call) -> None:
        """Write down a function that is converted."""
        assert call.module is not None
        self._note(path, _becomes(name, call.module), P_x, P_y, call)

    def grid_for(self, path: str) -> tuple[int, ...] | None:
        """The partition that the user's plan gives the input at a path."""
        return self._wanted.repartition_of(path)

    def _note(self, path: str, layer: str, P_x: Any, P_y: Any, call: Call | None = None) -> None:
        moved = call.repartition if call is not None else None
        self.plan.rows.append(Row(path, layer, P_x.shape, P_y.shape, moved))


class _Forward:
    """One forward of a user's module, followed from node to node."""

    def __init__(
        self, walk: Walk, module: torch.nn.Module, path: str, graph: torch.fx.Graph
    ) -> None:
        self._walk, self._module, self._path, self._graph = walk, module, path, graph
        self._values: dict[torch.fx.Node, Any] = {}
        self._is_changed = False

    def follow(self, given: list[Any]) -> Any:
        """The value of the output; children are replaced on the way, and nodes where they must."""
        arguments = iter(given)
        output = None
        for node in list(self._graph.nodes):
            if node.op == "placeholder":
                self._values[node] = next(arguments)
            elif node.op == "output":
                output = self._value_of(node.args[0])
            else:
                self._values[node] = self._step(node)
        return output

    def converted(self) -> torch.nn.Module:
        """The module itself, or, if nodes were replaced, another one with the new graph."""
        if not self._is_changed:
            return self._module
        for node in reversed(self._graph.nodes):
            if node.target in (getattr, operator.getitem, "size") and not node.users:
                self._graph.erase_node(node)
        old = self._module
        new = torch.fx.GraphModule(old, self._graph, class_name=type(old).__name__)
        # Also what the forward does not use, and containers as they are.
        new._modules.update(old._modules)
        new._parameters.update(old._parameters)
        new._buffers.update(old._buffers)
        return new.train(old.training)

    def _step(self, node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            found = _attribute_at(self._module, str(node.target))
            return Whole(tuple(found.shape), found.requires_grad)
        args, kwargs = self._value_of(node.args), self._value_of(node.kwargs)
        if node.op == "call_module":
            target = str(node.target)
            child = self._module.get_submodule(target)
            is_repeated = self._walk.has_made(child)
            path = self._below(node.name if is_repeated else target)
            new, output = self._walk.convert(child, path, *args, **kwargs)
            if new is not child and not is_repeated:
                _put(self._module, target, new)
            elif new is not child:
                call = Call(node.args[0])
                call.instead(new, output)
                self._replace(node, call, output)
            return output
        try:
            return self._call(node, args, kwargs)
        except (GpudistError, TypeError, ValueError, LookupError, AttributeError) as error:
            where = f"{_where(self._path)}: {_name_of(node)} at {line_of(node)}"
            raise ConversionError(f"{where}: {error}; {remedy(self._path)}") from error

    def _call(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        target = node.target
        if not any(map(depends_on_tensors, (args, kwargs))):
            raise ConversionError("its arguments depend on no input")
        if node.meta["follows_mode"] and target not in DROPOUTS:
            raise ConversionError("its arguments are others in training than in evaluation")
        is_method = node.op == "call_method"
        if target in (POINT_WISE_METHODS if is_method else POINT_WISE_FUNCTIONS):
            output = point_wise_output([args, kwargs])
            self._adapt_arguments(node, output)
            return output
        rule = METHODS.get(str(target)) if is_method else FUNCTIONS.get(target)
        if rule is None:
            raise ConversionError("it is not known to be right on blocks")
        if isinstance(args[0] if args else None, Whole):
            raise ConversionError("it is called on a parameter or buffer")
        path = self._below(node.name)
        call = Call(node.args[0] if node.args else None, self._walk.grid_for(path))
        call.follows_mode = node.meta["follows_mode"]
        if "input" in kwargs:
            call.node, args = node.kwargs["input"], (kwargs.pop("input"), *args)
        output = rule(call, *args, **kwargs)
        if call.module is not None:
            self._walk.note_call(path, _name_of(node), args[0], output, call)
            self._replace(node, call, output)
        return output

    def _adapt_arguments(self, node: torch.fx.Node, P_x: CartesianPartition) -> None:
        """Give ``node`` parameters whose gradients are summed, and pooled tensors where it is."""
        for used in node.all_input_nodes:
            value = self._values[used]
            if isinstance(value, Whole) and (value.requires_grad or value.shape):
                self._adapt(node, used, SharedParameter(P_x), f"shared_{used.name}")
            elif isinstance(value, Pooled) and not isinstance(P_x, Pooled):
                self._adapt(node, used, SpreadPooled(P_x), f"spread_{used.name}")

    def _adapt(
        self, node: torch.fx.Node, used: torch.fx.Node, module: torch.nn.Module, name: str
    ) -> None:
        """Have ``node`` use what ``module`` makes of an argument."""
        call = Call(used)
        value = call.instead(module, self._values[used])
        with self._graph.inserting_before(node):
            adapted = self._call_module(call, name)
        self._values[adapted] = value
        node.replace_input_with(used, adapted)

    def _replace(self, node: torch.fx.Node, call: Call, output: Any) -> None:
        with self._graph.inserting_before(node):
            new = self._call_module(call, node.name)
        self._values[new] = output
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _call_module(self, call: Call, name: str) -> torch.fx.Node:
        """A call of an inserted module, under a name that the user's module has not."""
        assert call.module is not None
        while hasattr(self._module, name):
            name = f"{name}_"
        self._module.add_module(name, call.module.train(self._module.training))
        self._is_changed = True
        return self._graph.call_module(name, call.inputs)

    def _value_of(self, argument: Any) -> Any:
        return map_arg(argument, lambda node: self._values[node])

    def _below(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _refusal(path: str, text: str) -> ConversionError:
    return ConversionError(f"{_where(path)}: {text}")


def _where(path: str) -> str:
    return path or "the module"


def _only_tensor(path: str, args: Any, kwargs: Any) -> CartesianPartition:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], CartesianPartition):
        raise _refusal(path, f"called with {len(given)} arguments; it needs one tensor")
    return given[0]


def _becomes(name: str, new: torch.nn.Module) -> str:
    kind = type(new).__name__
    return name if kind == name else f"{name} -> {kind}"


def _name_of(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _attribute_at(module: torch.nn.Module, target: str) -> torch.Tensor:
    *parents, name = target.split(".")
    return getattr(module.get_submodule(".".join(parents)), name)


def _put(module: torch.nn.Module, target: str, new: torch.nn.Module) -> None:
    *parents, name = target.split(".")
    module.get_submodule(".".join(parents))._modules[name] = new
