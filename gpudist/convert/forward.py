"""One forward of a user's module, followed from node to node of its graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.fx.node import map_arg

from gpudist.convert.aligned import Aligned
from gpudist.convert.functions import DROPOUTS, FUNCTIONS, JOINING, METHODS, MOVING, Call
from gpudist.convert.inserted import SpreadPooled
from gpudist.convert.layers import is_layer
from gpudist.convert.plan import Shape
from gpudist.convert.point_wise import (
    POINT_WISE_FUNCTIONS,
    POINT_WISE_METHODS,
    point_wise_output,
)
from gpudist.convert.shared import SharedTensor
from gpudist.convert.trace import line_of, remedy
from gpudist.convert.values import Pooled, Whole, are_of_one_size, depends_on_tensors, resized
from gpudist.errors import ConversionError, GpudistError
from gpudist.nn import Repartition
from gpudist.partition import CartesianPartition

if TYPE_CHECKING:
    from gpudist.convert.walk import Walk


class Forward:
    """The steps of one call of a user's module, each as it is on blocks.

    Args:
        walk: converts the children.
        module: whose children are replaced on the way.
        path: of the call.
        graph: of the forward; nodes are replaced where they must.
        is_repeated: the module was called before, and its tensors belong to what it became then.
    """

    def __init__(
        self,
        walk: Walk,
        module: torch.nn.Module,
        path: str,
        graph: torch.fx.Graph,
        is_repeated: bool,
    ) -> None:
        self._walk, self._module, self._path, self._graph = walk, module, path, graph
        self._is_repeated = is_repeated
        self._values: dict[torch.fx.Node, Any] = {}
        self._children: dict[str, torch.nn.Module] = {}
        self._called: set[str] = set()
        self._is_changed = False
        self.shared: list[SharedTensor] = []

    def follow(self, given: Sequence[Any]) -> Any:
        """The value of the output, from those of the arguments."""
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
            is_read = node.op == "get_attr" or node.target in (getattr, operator.getitem, "size")
            if is_read and not node.users:
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
            return Whole(tuple(found.shape), isinstance(found, torch.nn.Parameter))
        if node.op == "call_module":
            return self._call_child(node)
        try:
            return self._call(node)
        except (GpudistError, TypeError, ValueError, LookupError, AttributeError) as error:
            where = f"{self._path or 'the module'}: {_name_of(node)} at {line_of(node)}"
            raise ConversionError(f"{where}: {error}; {remedy(self._path)}") from error

    def _call_child(self, node: torch.fx.Node) -> Any:
        target = str(node.target)
        child = self._children.setdefault(target, self._module.get_submodule(target))
        is_first = target not in self._called
        self._called.add(target)
        path = self._below(target if is_first else node.name)
        if is_layer(type(child)) and not node.args:
            # Distributed layers have other names for it.
            node.args, node.kwargs = tuple(node.kwargs.values()), {}
            self._is_changed = True
        first = self._values.get(node.args[0]) if node.args else None  # pyright: ignore
        grid = self._walk.grid_before(child, path, first)
        if grid is not None:
            self._move_first(node, path, grid)
        args, kwargs = self._value_of(node.args), self._value_of(node.kwargs)
        known = self._walk.became(child)
        new, output = self._walk.convert(child, path, *args, **kwargs)
        if is_first and (known is None or self._is_repeated):
            _put(self._module, target, new)
            return output
        if is_first and known is not None:
            # Called before under another name, under both of which it is found.
            _put(self._module, target, known)
        if new is not known and new is not child:
            node.target = self._add(new, node.name)
        return output

    def _call(self, node: torch.fx.Node) -> Any:
        target = node.target
        args, kwargs = self._value_of(node.args), self._value_of(node.kwargs)
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
        grid = self._walk.wanted.repartition(path)
        if grid is not None and rule not in MOVING:
            self._move_first(node, path, grid)
            args, grid = self._value_of(node.args), None
        call = Call(node.args[0] if node.args else None)
        if grid is not None:
            call.grid = self._walk.wanted.partition(grid, args[0].dim)
        call.follows_mode, call.training = node.meta["follows_mode"], self._module.training
        call.arguments = tuple(node.args)
        if "input" in kwargs:
            call.node, args = node.kwargs["input"], (kwargs.pop("input"), *args)
        output = rule(call, *args, **kwargs)
        if call.module is not None:
            self._walk.note_call(path, _name_of(node), args[0], output, call)
            self._replace(node, call, output)
        elif target in JOINING:
            self._align(node, joined=True)
        return output

    def _move_first(self, node: torch.fx.Node, path: str, grid: Shape) -> None:
        """Have ``node`` take its first argument from another partition."""
        used = node.args[0] if node.args else None
        P_x = self._values.get(used) if isinstance(used, torch.fx.Node) else None
        if not isinstance(used, torch.fx.Node) or not isinstance(P_x, CartesianPartition):
            raise ConversionError(f"{path}: its first argument is no tensor, to repartition")
        P_y = resized(self._walk.wanted.partition(grid, P_x.dim))
        self._walk.note_move(path, P_x, P_y)
        module = Repartition(P_x, P_y)
        moved = self._insert_before(node, module, (used,), f"repartition_{node.name}")
        self._values[moved] = P_y
        node.args = (moved, *node.args[1:])

    def _adapt_arguments(self, node: torch.fx.Node, P_x: CartesianPartition) -> None:
        """Give ``node`` parameters whose gradients are summed, and pooled tensors where it is."""
        for used in node.all_input_nodes:
            value = self._values[used]
            if isinstance(value, Whole) and self._must_share(value):
                shared = SharedTensor(
                    P_x, self._walk.P_x, str(used.target), value.shape, value.is_parameter
                )
                self.shared.append(shared)
                self._adapt(node, used, shared, (), f"shared_{used.name}")
            elif isinstance(value, Pooled) and not isinstance(P_x, Pooled):
                self._adapt(node, used, SpreadPooled(P_x), (used,), f"spread_{used.name}")
        self._align(node, joined=False)

    def _must_share(self, value: Whole) -> bool:
        return value.is_parameter or bool(value.shape) or self._is_repeated

    def _align(self, node: torch.fx.Node, joined: bool) -> None:
        """Have ``node`` take tensors that may be of different sizes as they fit each other."""
        used = [n for n in node.all_input_nodes if _is_tensor(self._values[n])]
        tensors = [self._values[n] for n in used]
        if len(used) < 2 or are_of_one_size(tensors):
            return
        module = Aligned(tensors[0], len(used), joined)
        aligned = self._insert_before(node, module, tuple(used), f"aligned_{node.name}")
        self._values[aligned] = tensors
        for i, (old, value) in enumerate(zip(used, tensors, strict=True)):
            with self._graph.inserting_before(node):
                item = self._graph.call_function(operator.getitem, (aligned, i))
            self._values[item] = value
            node.replace_input_with(old, item)

    def _adapt(
        self,
        node: torch.fx.Node,
        used: torch.fx.Node,
        module: torch.nn.Module,
        inputs: tuple[Any, ...],
        name: str,
    ) -> None:
        """Have ``node`` use what ``module`` makes of an argument."""
        adapted = self._insert_before(node, module, inputs, name)
        self._values[adapted] = self._values[used]
        node.replace_input_with(used, adapted)

    def _replace(self, node: torch.fx.Node, call: Call, output: Any) -> None:
        assert call.module is not None
        new = self._insert_before(node, call.module, call.inputs, node.name)
        self._values[new] = output
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _insert_before(
        self, node: torch.fx.Node, module: torch.nn.Module, inputs: tuple[Any, ...], name: str
    ) -> torch.fx.Node:
        target = self._add(module.train(self._module.training), name)
        with self._graph.inserting_before(node):
            return self._graph.call_module(target, inputs)

    def _add(self, module: torch.nn.Module, name: str) -> str:
        """Add a child under a name that the user's module has not; the name."""
        while hasattr(self._module, name):
            name = f"{name}_"
        self._module.add_module(name, module)
        self._is_changed = True
        return name

    def _value_of(self, argument: Any) -> Any:
        return map_arg(argument, lambda node: self._values[node])

    def _below(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _is_tensor(value: Any) -> bool:
    return isinstance(value, CartesianPartition) and not isinstance(value, Pooled)


def _name_of(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _attribute_at(module: torch.nn.Module, target: str) -> torch.Tensor:
    *parents, name = target.split(".")
    return getattr(module.get_submodule(".".join(parents)), name)


def _put(module: torch.nn.Module, target: str, new: torch.nn.Module) -> None:
    *parents, name = target.split(".")
    module.get_submodule(".".join(parents))._modules[name] = new
