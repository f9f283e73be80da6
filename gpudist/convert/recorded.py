"""Run a converted network through torch.compile, as a flat graph of this rank's computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpudist.checks.arguments import checked
from gpudist.convert.converted import conversion_of
from gpudist.convert.kept import names_of, paths_of
from gpudist.convert.known import READS
from gpudist.convert.network import without_terms
from gpudist.errors import ConversionError
from gpudist.sbp.call import key_of
from gpudist.sbp.global_spec import GlobalSpec, local_of, spec_of, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.interception import intercept
from gpudist.sbp.registry import name_of
from gpudist.sbp.scope import Scope, enter_scope, where_called
from gpudist.sbp.trees import tensors_in

_MOST_GRAPHS = 8

_VALUES = "it reads values of this call, which the graph would repeat in every call"
_SIZE = "the size of its result depends on values, but the graph would repeat that of this call"
_TENSORS = "compute with tensors of fixed shapes, such as torch.where in place of if"
T = torch.Tensor
_HOOKS = {
    T.register_hook, T.register_post_accumulate_grad_hook,
    T.data.__set__, T.grad.__set__,  # pyright: ignore
}  # fmt: skip
# Functions whose results have a shape that depends on values.
_COUNTS = {
    getattr(room, name)
    for room in (torch, T)
    for name in (
        "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
    )
}  # fmt: skip
_REPEATS = {torch.repeat_interleave, T.repeat_interleave}


@dataclass(frozen=True)
class _Graph:
    """Compiled graph for one kind of call.

    Attributes:
        run: maps parameters, buffers and parts of the inputs to parts of the outputs.
        tree: nesting of the outputs.
        others: outputs that are not tensors, with ``None`` for each tensor.
        specs: spec of each output; ``None`` for those that are not tensors.
    """

    run: Callable[..., Any]
    tree: Any
    others: tuple[Any, ...]
    specs: tuple[GlobalSpec | None, ...]


class _RefusingMode(TorchFunctionMode):
    """Mode that refuses what a recorded graph cannot express.

    Otherwise the graph would silently repeat values of the recorded call, or lose gradients.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.scope = scope

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HOOKS:
            remedy = "register hooks and set data before the call"
            raise self.refusal(func, "a graph calls no hooks and sets no data", remedy)
        if func in READS and _depends(args, kwargs):
            raise self.refusal(func, _VALUES)
        if _has_open_shape(func, args, kwargs) and _depends(args, kwargs):
            raise self.refusal(func, _SIZE)
        draws = self.scope.draws
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if "value out of a tracing tensor" not in str(error):
                raise
            raise self.refusal(func, _VALUES) from error
        if self.scope.draws != draws:
            reason = "it draws random numbers, which the graph would repeat in every call"
            raise self.refusal(func, reason, "set the network to eval()")
        return result

    def refusal(self, func: Any, reason: str, remedy: str = _TENSORS) -> ConversionError:
        return ConversionError(
            f"compiled: {where_called(self.scope)}: {name_of(func)}: {reason}; {remedy}, or call "
            "the network itself"
        )


def _depends(args: Any, kwargs: Any) -> bool:
    """Return whether the graph computes an argument from its inputs, parameters or buffers."""
    mode: Any = get_proxy_mode()
    nodes: list[Any] = []
    for x in tensors_in([args, kwargs]):
        if isinstance(x, GlobalTensor):
            return True
        slot: Any = get_proxy_slot(x, mode.tracer, None)
        nodes += [] if slot is None else [slot.proxy.node]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.op == "placeholder":
            return True
        nodes += set(node.all_input_nodes) - seen
        seen.update(nodes)
    return False


def _has_open_shape(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the shape of the result depends on values."""
    if func is T.__getitem__:
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1:]))
    if func in (torch.where, T.where):
        return len(args) + len(kwargs) == 1
    if func in _REPEATS:
        return len(tensors_in(args[-1:])) == 1 and "output_size" not in kwargs
    return func in _COUNTS


class Compiled:
    """Network that runs one compiled graph for each kind of call; see :func:`compiled`.

    Attributes:
        network: converted network; every call uses its parameters, buffers and modes.
        backend: backend of torch.compile.
    """

    def __init__(self, network: nn.Module, backend: str | Callable[..., Any]) -> None:
        self.network = network
        self.backend = backend
        self._conversion = conversion_of(network)
        self._graphs: dict[Any, _Graph] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        conversion = self._conversion
        conversion.agree(self.network)
        parts = conversion.compared.inputs(self.network.forward, args, kwargs)
        args, kwargs = conversion.enter_arguments(self.network.forward, args, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        key = self._key(leaves, tree)
        if parts is not None:
            conversion.compared.fold("modes", [repr(key[-1]).encode()])
        # The key contains only global facts, so that all ranks compute the same key and record
        # together.
        if key not in self._graphs:
            if len(self._graphs) >= _MOST_GRAPHS:
                raise ConversionError(
                    f"compiled: {_MOST_GRAPHS} graphs were recorded, the limit, for different "
                    "shapes, dtypes, modes or arguments; call the network itself if these change "
                    "often"
                )
            self._graphs[key] = self._record(leaves, tree)
        graph = self._graphs[key]
        results = graph.run(self._state(), [local_of(x) for x in tensors])
        parts = iter(results)
        outputs = [
            other if how is None else wrap(GlobalTensor, next(parts), how)
            for other, how in zip(graph.others, graph.specs, strict=True)
        ]
        return tree_unflatten(outputs, graph.tree)

    def _state(self) -> list[torch.Tensor]:
        parameters = self._conversion.parameters
        in_use = [*self.network.parameters(), *parameters.unlisted]
        return [*parameters.substitutes(in_use), *self.network.buffers()]

    def _key(self, leaves: Sequence[Any], tree: Any) -> Any:
        facts: list[Any] = []
        for i, x in enumerate(leaves):
            if isinstance(x, GlobalTensor):
                facts.append((spec_of(x), x.requires_grad))
            elif isinstance(x, torch.Tensor):
                facts.append((tuple(x.shape), x.dtype, x.requires_grad))
            else:
                try:
                    facts.append(key_of(x))
                except TypeError as error:
                    raise ConversionError(
                        f"compiled: argument {i} of the call: {error}, and a graph repeats what it "
                        "was recorded with; pass such values or tensors, or call the network itself"
                    ) from None
        device = self._conversion.P_x.device.type
        modes = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            tuple([module.training for module in self.network.modules()]),
            tuple([p.requires_grad for p in self.network.parameters()]),
        )
        return tuple(facts), tree, modes

    def _record(self, leaves: Sequence[Any], tree: Any) -> _Graph:
        """Record the graph of a call, and restore the buffers that the recording modified.

        Raises:
            ConversionError: a graph cannot express the call; the message names module and function.
        """
        network, scope = self.network, self._conversion.scope
        scope.paths, scope.name_of = paths_of(network), names_of(network)
        facts: dict[str, Any] = {}

        def forward(state: list[torch.Tensor], blocks: list[torch.Tensor]) -> list[torch.Tensor]:
            parts = iter(blocks)
            inputs = [
                wrap(GlobalTensor, next(parts), spec_of(x))
                if isinstance(x, GlobalTensor)
                else next(parts)
                if isinstance(x, torch.Tensor)
                else x
                for x in leaves
            ]
            args, kwargs = tree_unflatten(inputs, tree)
            parameters = self._conversion.parameters
            in_use = [*network.parameters(), *parameters.unlisted, *network.buffers()]
            substitutes = {id(x): y for x, y in zip(in_use, state, strict=True)}
            with _standing_for(network, substitutes), intercept(scope), _RefusingMode(scope):
                scope.substitutes, scope.calls = substitutes, {}
                scope.learns = parameters.holders is not None and torch.is_grad_enabled()
                result = network(*args, **kwargs)
            with enter_scope(scope):
                outputs, facts["tree"] = tree_flatten(self._conversion.leave_results(result))
            facts["others"] = tuple(None if isinstance(y, torch.Tensor) else y for y in outputs)
            ends = [without_terms(y) for y in outputs if isinstance(y, GlobalTensor)]
            specs = map(spec_of, ends)
            facts["specs"] = tuple(
                next(specs) if isinstance(y, GlobalTensor) else None for y in outputs
            )
            return [local_of(y) for y in ends]

        state = self._state()
        buffers = [(b, b.clone()) for b in network.buffers()]
        blocks = [local_of(x) for x in leaves if isinstance(x, torch.Tensor)]
        try:
            graph = make_fx(forward, tracing_mode="real", pre_dispatch=True)(state, blocks)
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
        if self._conversion.expects_pins:
            self._conversion.require_pins(scope)
        _drop_unused(graph)
        run = torch.compile(graph, fullgraph=True, backend=self.backend)
        return _Graph(run, facts["tree"], facts["others"], facts["specs"])


def _drop_unused(graph: torch.fx.GraphModule) -> None:
    for node in reversed(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        is_pure = schema is not None and not schema.is_mutable and schema.name.startswith("aten::")
        if node.op == "call_function" and is_pure and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()


@contextmanager
def _standing_for(network: nn.Module, new: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace the parameters and buffers by the tensors ``new``, by identity."""
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
        replaced = [name for kind, name, x in places if kind.get(name) is not new[id(x)]]
        if replaced:
            raise ConversionError(
                f"compiled: the forward replaces {replaced}, and a graph would do so only once; "
                "change them in place, x.copy_(value), or call the network itself"
            )
    finally:
        for kind, name, x in places:
            kind[name] = x  # pyright: ignore


@checked(ConversionError)
def compiled(
    network: torch.nn.Module, *inputs: Any, backend: str | Callable[..., Any] = "inductor"
) -> Compiled:
    """Return a converted network whose calls are recorded once, and run as compiled graphs.

    Each kind of call is recorded as a flat graph of torch functions for this rank, in which
    movements are ``torch.ops.gpudist.move``, and compiled with ``fullgraph=True``. The kind
    comprises global shapes, dtypes and ``requires_grad`` of the inputs, arguments that are not
    tensors, and whether training mode, gradients and autocast are on. All ranks record a new kind
    of call together, and a graph serves no other kind.

    Args:
        network: result of :func:`distribute`. It keeps its own parameters and buffers.
        inputs: blocks of a call to record immediately.
        backend: backend of torch.compile.

    Returns:
        Callable that takes blocks and returns global tensors, like the network.

    Cost:
        One call, recording and compilation for each kind; afterwards the cost of the graph, without
        Python between functions. The sum of the parameters' gradients remains one node outside the
        graph.

    Raises:
        ConversionError: on every rank alike, if a graph cannot express a call, because it draws
            random numbers, reads values of tensors, registers hooks or, with gradients, applies an
            ``autograd.Function``; the message names the module and the line. Also if more than 8
            kinds occur, or the network was not converted.
    """
    network_of_graphs = Compiled(network, backend)
    if inputs:
        network_of_graphs(*inputs)
    return network_of_graphs
