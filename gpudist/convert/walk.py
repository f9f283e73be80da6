"""The walk over a tree of modules: along the graph of every forward, from the root down."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, cast

import torch

from gpudist.convert.forward import Forward
from gpudist.convert.functions import Call, flattened
from gpudist.convert.layers import LAYERS, POINT_WISE_LAYERS, is_layer, output_partition
from gpudist.convert.linear import converted_linear, cut_of_weight, grid_of_input
from gpudist.convert.plan import Plan, Row, Shape
from gpudist.convert.point_wise import point_wise_output
from gpudist.convert.shared import DistributedPReLU, FurtherCall
from gpudist.convert.trace import traced
from gpudist.convert.transformer import COMPOSITIONS, converted_attention
from gpudist.convert.values import Pooled, Whole, are_of_one_size, depends_on_tensors, resized
from gpudist.convert.wanted import Wanted
from gpudist.convert.weights import copy_weights
from gpudist.errors import ConversionError, GpudistError
from gpudist.partition import CartesianPartition


class _Done(NamedTuple):
    """A module that was called, and what it has become.

    Attributes:
        module: as it was; the entry keeps it, so that its identity is not given to another.
        untouched: the same before its children were replaced.
        path, args, kwargs: of its first call, and the values it was called with.
        converted, output: what it has become, and the value of its output.
    """

    module: torch.nn.Module
    untouched: torch.nn.Module
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    converted: torch.nn.Module
    output: Any


class Walk:
    """Converts the modules of one tree, which it changes, and writes down what it does.

    Args:
        wanted: the user's plan.
        P_x: the workers of the network.
        replicate_parameters: every worker that uses a parameter of a layer holds it.

    Attributes:
        plan: what was done.
    """

    def __init__(self, wanted: Plan, P_x: CartesianPartition, replicate_parameters: bool) -> None:
        self.P_x = P_x
        self.wanted = Wanted(wanted, P_x)
        self.plan = Plan(trusted=set(wanted.trusted))
        self._replicate = replicate_parameters
        self._moved: dict[str, tuple[Shape, Shape]] = {}
        self._done: dict[int, _Done] = {}
        self._repeated = 0
        # By the identity of a user's dict of parameters, which copies share: whose they are now.
        self._owners: dict[int, tuple[Any, torch.nn.Module]] = {}

    def became(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """What a module became when it was called first, ``None`` if it was not called yet."""
        done = self._done.get(id(module))
        return None if done is None else done.converted

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
        if id(module) in self._done:
            return self._again(self._done[id(module)], path, args, kwargs)
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise refusal(path, "it has hooks; register them after the conversion")
        untouched = _untouched(module)
        converted, output = self._converted(module, path, path, args, kwargs)
        # Shared modules are found again as they are and as they have become.
        done = _Done(module, untouched, path, args, kwargs, converted, output)
        self._done[id(module)] = self._done[id(converted)] = done
        return converted, output

    def _again(self, done: _Done, path: str, args: Any, kwargs: Any) -> tuple[torch.nn.Module, Any]:
        """A further call of a module: agrees by itself, unless its input is known to be alike."""
        kind = type(done.module)
        if kind in POINT_WISE_LAYERS:
            return done.module, _only_tensor(path, args, kwargs)
        if _are_alike((done.args, done.kwargs), (args, kwargs)) and not self._repeated:
            return done.converted, done.output
        if is_layer(kind):
            return self._layer_again(done, path, _only_tensor(path, args, kwargs))
        self._repeated += 1
        new, output = self._converted(_untouched(done.untouched), path, done.path, args, kwargs)
        self._repeated -= 1
        return new, output

    def _layer_again(
        self, done: _Done, path: str, P_x: CartesianPartition
    ) -> tuple[torch.nn.Module, CartesianPartition]:
        P_first = _only_tensor(done.path, done.args, done.kwargs)
        has_tensors = any(True for _ in (*done.module.parameters(), *done.module.buffers()))
        if has_tensors and P_x != P_first:
            raise refusal(
                path,
                f"called with {P_x}, but as {done.path!r} with {P_first}, for which its weights "
                "are placed; give each call a module of its own",
            )
        new, P_y = self._layer(done.module, path, P_x)
        return (FurtherCall(done.converted, new) if has_tensors else new), P_y

    def _converted(
        self,
        module: torch.nn.Module,
        path: str,
        first_path: str,
        args: Any,
        kwargs: Any,
    ) -> tuple[torch.nn.Module, Any]:
        kind = type(module)
        if self.wanted.trusts(first_path):
            return self._trusted(module, path, args, kwargs)
        if kind in POINT_WISE_LAYERS:
            P_x = _only_tensor(path, args, kwargs)
            self._note(path, kind.__name__, P_x, P_x)
            return module, P_x
        if is_layer(kind):
            return self._layer(module, path, _only_tensor(path, args, kwargs))
        if kind in COMPOSITIONS:
            return self._user_defined(COMPOSITIONS[kind](module), path, args, kwargs)
        if isinstance(module, torch.nn.MultiheadAttention):
            return self._attention(module, path, args, kwargs)
        if kind.__module__.startswith("torch.nn.") and kind is not torch.nn.Sequential:
            raise refusal(path, f"torch.nn.{kind.__name__} is not supported")
        return self._user_defined(module, path, args, kwargs)

    def _layer(
        self, layer: torch.nn.Module, path: str, P_x: CartesianPartition
    ) -> tuple[torch.nn.Module, CartesianPartition]:
        call = Call(None)
        try:
            new, P_y = self._of_blocks(layer, path, P_x, call)
        except GpudistError as error:
            raise refusal(path, f"{error}") from error
        copy_weights(layer, new)
        self._note(path, _becomes(type(layer).__name__, new), P_x, P_y, call, new)
        return new.train(layer.training), P_y

    def _of_blocks(
        self, layer: torch.nn.Module, path: str, P_x: CartesianPartition, call: Call
    ) -> tuple[torch.nn.Module, CartesianPartition]:
        if isinstance(layer, torch.nn.Flatten):
            grid = self.wanted.repartition(path)
            call.grid = None if grid is None else self.wanted.partition(grid, P_x.dim)
            P_y = flattened(call, P_x, layer.start_dim, layer.end_dim)
            return call.module or layer, P_y
        if isinstance(layer, torch.nn.PReLU):
            point_wise_output([P_x, Whole((layer.num_parameters, *(1,) * (P_x.dim - 2)), True)])
            return DistributedPReLU(P_x, self.P_x, layer), P_x
        if isinstance(layer, torch.nn.Linear):
            return converted_linear(layer, path, P_x, self.wanted, self._replicate)
        if getattr(layer, "return_indices", False):
            raise ConversionError("return_indices is not supported")
        new = LAYERS[type(layer)](layer, P_x, self._replicate)
        return new, output_partition(layer, P_x)

    def _attention(
        self, layer: torch.nn.MultiheadAttention, path: str, args: Any, kwargs: Any
    ) -> tuple[torch.nn.Module, Any]:
        """Multi-head attention, which gives its output and, in place of the weights, ``None``."""
        own = layer._parameters
        if id(own) in self._owners:
            raise refusal(path, "called again with other tensors; give each call its own module")
        try:
            new, P_y = converted_attention(layer, self._replicate, args, kwargs)
        except (GpudistError, TypeError, LookupError) as error:
            raise refusal(path, f"{error}") from error
        self._owners[id(own)] = own, new
        self._note(path, _becomes(type(layer).__name__, new), P_y, P_y)
        return new, (P_y, None)

    def _trusted(
        self, module: torch.nn.Module, path: str, args: Any, kwargs: Any
    ) -> tuple[torch.nn.Module, Any]:
        """A module whose forward is kept, unseen; its children have the partition of its input."""
        if next(module.parameters(recurse=False), None) is not None:
            raise refusal(
                path,
                "a trusted module may not have parameters of its own, whose gradients "
                "would not be summed over the workers",
            )
        P_x = _only_tensor(path, args, kwargs)
        if id(module._buffers) in self._owners:
            module.__dict__["_non_persistent_buffers_set"] = set(module._buffers)
        self._owners[id(module._buffers)] = module._buffers, module
        self._note(path, f"{type(module).__name__} (trusted)", P_x, P_x)
        for name, child in module.named_children():
            setattr(module, name, self._below_trusted(child, f"{path}.{name}", P_x))
        return module, resized(P_x)

    def _below_trusted(
        self, child: torch.nn.Module, path: str, P_x: CartesianPartition
    ) -> torch.nn.Module:
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            for name, grandchild in child.named_children():
                child._modules[name] = self._below_trusted(grandchild, f"{path}.{name}", P_x)
            return child
        return self.convert(child, path, resized(P_x))[0]

    def _user_defined(
        self, module: torch.nn.Module, path: str, args: Any, kwargs: Any
    ) -> tuple[torch.nn.Module, Any]:
        """A module with a forward of its own: kept if that is right on blocks, else its graph."""
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise refusal(path, f"{error}") from error
        graph = traced(module, path, depends_on_tensors, bound.arguments, self.wanted.names(path))
        own = module._parameters
        is_repeated = id(own) in self._owners
        forward = Forward(self, module, path, graph, is_repeated)
        output = forward.follow(list(bound.arguments.values()))
        converted = forward.converted()
        if is_repeated:
            # Its tensors are those of the module that was called first, under that one's name.
            converted.__dict__.update(_parameters={}, _buffers={})
        _, owner = self._owners.setdefault(id(own), (own, converted))
        for shared in forward.shared:
            shared.belong_to(owner)
        return converted, output

    def grid_before(self, module: torch.nn.Module, path: str, P_x: Any) -> Shape | None:
        """The partition to which the first argument of a module is moved before its call."""
        done = self._done.get(id(module))
        first = module if done is None else done.module
        if isinstance(first, torch.nn.Flatten):
            return None
        grid = self.wanted.repartition(path)
        if not isinstance(P_x, CartesianPartition):
            return grid
        try:
            if isinstance(first, torch.nn.Linear):
                grid = grid_of_input(path, P_x, grid, self.wanted)
            if grid is None:
                return None
            P_y = self.wanted.partition(grid, P_x.dim)
        except ConversionError as error:
            raise refusal(path, f"{error}") from error
        return None if P_y == P_x and not isinstance(P_x, Pooled) else P_y.shape

    def note_call(self, path: str, name: str, P_x: Any, P_y: Any, call: Call) -> None:
        """Write down a function that is converted."""
        assert call.module is not None
        self._note(path, _becomes(name, call.module), P_x, P_y, call)

    def note_move(self, path: str, P_x: CartesianPartition, P_y: CartesianPartition) -> None:
        """Write down that a tensor is moved before a call."""
        self._moved[path] = P_x.shape, P_y.shape
        row = Row(path, "Repartition", P_x.shape, P_y.shape, P_y.shape)
        self.plan.rows.append(row)

    def _note(
        self,
        path: str,
        layer: str,
        P_x: Any,
        P_y: Any,
        call: Call | None = None,
        new: torch.nn.Module | None = None,
    ) -> None:
        source, moved = P_x.shape, call.repartition if call is not None else None
        if path in self._moved:
            # The row of the move becomes that of the layer behind it.
            source, moved = self._moved.pop(path)
            self.plan.rows.pop()
        self.plan.rows.append(Row(path, layer, source, P_y.shape, moved, cut_of_weight(new)))


def refusal(path: str, text: str) -> ConversionError:
    """The error of a module at a path."""
    return ConversionError(f"{path or 'the module'}: {text}")


def _untouched(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a user's modules, of the same tensors and with the same layers below."""
    kind = type(module)
    if is_layer(kind) or kind in POINT_WISE_LAYERS:
        return module
    copied = cast(torch.nn.Module, object.__new__(kind))
    copied.__dict__.update(module.__dict__)
    copied.__dict__["_modules"] = {
        name: None if child is None else _untouched(child)
        for name, child in module._modules.items()
    }
    return copied


def _are_alike(first: Any, second: Any) -> bool:
    """Whether two calls are of tensors of one size on the same workers."""
    if first != second or type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return all(_are_alike(*pair) for pair in zip(first, second, strict=True))
    if isinstance(first, dict):
        return all(_are_alike(first[name], second[name]) for name in first)
    return not isinstance(first, CartesianPartition) or are_of_one_size([first, second])


def _only_tensor(path: str, args: Any, kwargs: Any) -> CartesianPartition:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], CartesianPartition):
        raise refusal(path, f"called with {len(given)} arguments; it needs one tensor")
    return given[0]


def _becomes(name: str, new: torch.nn.Module) -> str:
    kind = type(new).__name__
    return name if kind == name else f"{name} -> {kind}"
