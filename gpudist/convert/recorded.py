"""A converted network as a flat graph of what this rank computes, through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpudist.checks.arguments import checked
from gpudist.convert.network import conversion_of, paths_of, without_terms
from gpudist.errors import ConversionError
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.interception import intercepted
from gpudist.sbp.lies import Lies, wrapped

_MOST_GRAPHS = 8


@dataclass(frozen=True)
class _Graph:
    """What was recorded for calls of one kind.

    Attributes:
        run: of the parameters and buffers, and the parts of the inputs; gives those of the outputs.
        tree: how outputs are nested; ``None`` stands for each tensor.
        lies: how each output lies.
    """

    run: Callable[..., Any]
    tree: Any
    others: tuple[Any, ...]
    lies: tuple[Lies | None, ...]


class Compiled:
    """A network whose calls are compiled graphs, one for each kind of call: see :func:`compiled`.

    Attributes:
        network: which was recorded; its parameters, buffers and modes are those of every call.
        backend: what compiles.
    """

    def __init__(self, network: nn.Module, backend: str | Callable[..., Any]) -> None:
        self.network = network
        self.backend = backend
        self._conversion = conversion_of(network)
        self._graphs: dict[Any, _Graph] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        conversion = self._conversion
        conversion.agree_on_seed()
        args, kwargs = conversion.entered(self.network.forward, args, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        key = self._key(leaves, tree)
        # All ranks see the same key, of global facts, and record together.
        if key not in self._graphs:
            if len(self._graphs) >= _MOST_GRAPHS:
                raise ConversionError(
                    f"compiled: {_MOST_GRAPHS} graphs were recorded for other shapes, dtypes, "
                    "modes or arguments; call the network itself where these change often"
                )
            self._graphs[key] = self._recorded(leaves, tree)
        graph = self._graphs[key]
        found = graph.run(self._state(), [getattr(x, "_local", x) for x in tensors])
        parts = iter(found)
        outputs = [
            other if how is None else wrapped(GlobalTensor, next(parts), how)
            for other, how in zip(graph.others, graph.lies, strict=True)
        ]
        return tree_unflatten(outputs, graph.tree)

    def _state(self) -> list[torch.Tensor]:
        """The parameters as a call uses them, and the buffers."""
        own = list(self.network.parameters())
        return [*self._conversion.parameters.lent(own), *self.network.buffers()]

    def _key(self, leaves: Sequence[Any], tree: Any) -> Any:
        facts: list[Any] = []
        for x in leaves:
            if isinstance(x, GlobalTensor):
                facts.append((x._lies, x.requires_grad))
            elif isinstance(x, torch.Tensor):
                facts.append((tuple(x.shape), x.dtype, x.requires_grad))
            else:
                facts.append((type(x), repr(x)))
        device = self._conversion.P_x.device.type
        modes = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            tuple([module.training for module in self.network.modules()]),
            tuple([p.requires_grad for p in self.network.parameters()]),
        )
        return tuple(facts), str(tree), modes

    def _recorded(self, leaves: Sequence[Any], tree: Any) -> _Graph:
        """The graph of a call, without carrying it out twice: what it changes is put back.

        Raises:
            ConversionError: the call draws random numbers, which a graph would repeat.
        """
        network, scope = self.network, self._conversion.scope
        scope.paths = paths_of(network)
        found: dict[str, Any] = {}

        def forward(state: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
            parts = iter(given)
            own = [
                wrapped(GlobalTensor, next(parts), x._lies)
                if isinstance(x, GlobalTensor)
                else next(parts)
                if isinstance(x, torch.Tensor)
                else x
                for x in leaves
            ]
            args, kwargs = tree_unflatten(own, tree)
            with _standing_for(network, state), intercepted(scope):
                result = network.forward(*args, **kwargs)
            outputs, found["tree"] = tree_flatten(self._conversion.left(result))
            found["others"] = tuple(None if isinstance(y, torch.Tensor) else y for y in outputs)
            ends = [without_terms(y) for y in outputs if isinstance(y, GlobalTensor)]
            lies = iter(ends)
            found["lies"] = tuple(
                next(lies)._lies if isinstance(y, GlobalTensor) else None for y in outputs
            )
            return [y._local for y in ends]

        state = self._state()
        buffers = [(b, b.clone()) for b in network.buffers()]
        given = [getattr(x, "_local", x) for x in leaves if isinstance(x, torch.Tensor)]
        draws = scope.draws
        graph = make_fx(forward, tracing_mode="real", pre_dispatch=True)(state, given)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        if scope.draws != draws:
            raise ConversionError(
                "compiled: the network draws random numbers, which a recorded graph would repeat; "
                "call the network itself, or set it to eval()"
            )
        _drop_unused(graph)
        run = torch.compile(graph, fullgraph=True, backend=self.backend)
        return _Graph(run, found["tree"], found["others"], found["lies"])


def _drop_unused(graph: torch.fx.GraphModule) -> None:
    """Leave out functions of torch whose result nobody uses; movements stay, as on other ranks."""
    for node in reversed(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        is_pure = schema is not None and not schema.is_mutable and schema.name.startswith("aten::")
        if node.op == "call_function" and is_pure and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()


@contextmanager
def _standing_for(network: nn.Module, state: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have other tensors stand for the parameters and buffers, in their order."""
    own = [*network.parameters(), *network.buffers()]
    new = {id(x): y for x, y in zip(own, state, strict=True)}
    places = [
        (kind, name, x)
        for module in network.modules()
        for kind in (module._parameters, module._buffers)
        for name, x in kind.items()
        if x is not None
    ]
    try:
        for kind, name, x in places:
            kind[name] = new[id(x)]  # pyright: ignore
        yield
    finally:
        for kind, name, x in places:
            kind[name] = x  # pyright: ignore


@checked(ConversionError)
def compiled(
    network: torch.nn.Module, *inputs: Any, backend: str | Callable[..., Any] = "inductor"
) -> Compiled:
    """A converted network whose calls are recorded once and run through torch.compile.

    What a rank computes for inputs of one kind is a flat graph of torch's functions, in which
    movements are ``torch.ops.gpudist.move``, compiled with ``fullgraph=True``. Inputs of another
    kind, another global shape, dtype, train or eval, gradients or autocast on or off,
    ``requires_grad``, or other arguments that are no tensors, are recorded anew, on all ranks
    together; a graph is never used for another kind.

    Args:
        network: what :func:`distribute` returned. Its parameters and buffers stay its own.
        inputs: blocks, as its calls take them, to be recorded now.
        backend: of torch.compile.

    Returns:
        What takes blocks and gives global tensors, as the network does.

    Cost:
        A call, a graph of it and its compilation, for each kind; then that of the graph, without
        Python between functions. The sums of parameters' gradients stay one node outside of it.

    Raises:
        ConversionError: the network draws random numbers in a call, more than 8 kinds are met, or
            it is no converted network.
    """
    made = Compiled(network, backend)
    if inputs:
        made(*inputs)
    return made
