"""The graph of one forward, in which the module's children are calls.

Torch's own tracer patches ``torch.nn.Module`` for the time of tracing, which other threads see:
here a copy of the module has children that record their calls.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx
from torch.fx.proxy import GraphAppendingTracer

from gpudist.errors import ConversionError

# Of these, children are called one by one; the containers themselves are calls where a plan says.
CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", __file__)


def traced(
    module: torch.nn.Module,
    path: str,
    is_traced: Callable[[Any], bool],
    given: Mapping[str, Any],
    called: Collection[str] = (),
) -> torch.fx.Graph:
    """The graph of ``module.forward``, called with these arguments.

    Args:
        module: its children become nodes ``call_module``.
        path: of the module.
        is_traced: whether an argument is one that the graph depends on; others are constants.
        given: the arguments by name. Each has a placeholder, in this order.
        called: paths below the module's of ``torch.nn.Sequential`` that are calls themselves.

    Raises:
        ConversionError: the forward cannot be traced, or depends on ``training``.
    """
    where = path or "the module"
    graphs = [
        _traced(module, path, is_traced, given, called, training) for training in (False, True)
    ]
    evaluation, training = (list(graph.nodes) for graph in graphs)
    if [(n.op, n.target) for n in evaluation] != [(n.op, n.target) for n in training]:
        raise ConversionError(
            f"{where}: its forward takes other steps in training than in evaluation, of which a "
            f"conversion would keep one; {remedy(path)}"
        )
    for pair in zip(evaluation, training, strict=True):
        arguments = {str((node.args, node.kwargs)) for node in pair}
        for node in pair:
            node.meta["follows_mode"] = len(arguments) > 1
    return graphs[module.training]


def remedy(path: str) -> str:
    """What to do about a forward that cannot be converted."""
    return (
        "write it with layers of torch.nn, or, if it is right on blocks, pass "
        f"plan=Plan(trusted={{{path!r}}})"
    )


def line_of(node: torch.fx.Node) -> str:
    """Where in the user's source the node was made."""
    return str(node.meta.get("line", "unknown line"))


def _traced(
    module: torch.nn.Module,
    path: str,
    is_traced: Callable[[Any], bool],
    given: Mapping[str, Any],
    called: Collection[str],
    training: bool,
) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    tracer = _Tracer(graph, module)
    arguments = dict(given)
    for name, value in given.items():
        proxy = torch.fx.Proxy(graph.placeholder(name), tracer)
        if is_traced(value):
            arguments[name] = proxy
    recording = _with_recorders(module, "", tracer, called)
    recording.training = training
    try:
        output = recording.forward(**arguments)
        graph.output(tracer.create_arg(output))
    except Exception as error:
        raise ConversionError(
            f"{path or 'the module'}: the forward of {type(module).__name__} cannot be traced "
            f"({error}); {remedy(path)}"
        ) from error
    return graph


def _with_recorders(
    module: torch.nn.Module, path: str, tracer: _Tracer, called: Collection[str]
) -> torch.nn.Module:
    """A shallow copy of ``module`` whose children record their calls."""
    copy = cast(torch.nn.Module, object.__new__(type(module)))
    copy.__dict__.update(module.__dict__)
    children: dict[str, torch.nn.Module | None] = {}
    for name, child in module._modules.items():
        target = f"{path}.{name}" if path else name
        is_called = type(child) is torch.nn.Sequential and target in called
        if type(child) in CONTAINERS and not is_called:
            assert child is not None
            children[name] = _with_recorders(child, target, tracer, called)
        else:
            children[name] = None if child is None else _Recorder(child, target, tracer)
    copy.__dict__["_modules"] = children
    return copy


class _Recorder(torch.nn.Module):
    """Stands for a child while its parent is traced."""

    def __init__(self, child: torch.nn.Module, target: str, tracer: _Tracer) -> None:
        super().__init__()
        self.__dict__["_of"] = (child, target, tracer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _, target, tracer = self.__dict__["_of"]
        return tracer.create_proxy("call_module", target, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        child, target, _ = self.__dict__["_of"]
        value = getattr(child, name)
        if isinstance(value, torch.Tensor | torch.nn.Module) or inspect.ismethod(value):
            raise TypeError(f"it uses {target}.{name}, which a distributed layer has not")
        return value


class _Tracer(GraphAppendingTracer):
    def __init__(self, graph: torch.fx.Graph, module: torch.nn.Module) -> None:
        super().__init__(graph)
        self._names = {id(x): n for n, x in (*module.named_parameters(), *module.named_buffers())}
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        if _modes() != self._modes:
            raise TypeError("it changes the grad mode or autocast on its way")
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        if frame is not None:
            node.meta["line"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if id(a) not in self._names:
                raise TypeError(
                    f"it uses a tensor of shape {list(a.shape)} that is neither a parameter nor a "
                    "buffer and depends on no input"
                )
            return self.create_node("get_attr", self._names[id(a)], (), {})
        return super().create_arg(a)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))
