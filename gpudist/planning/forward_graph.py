"""Record the functions that a converted network calls, and which results each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gpudist.geometry.layout import NdSbp
from gpudist.nn.autocast_on_meta import same_autocast
from gpudist.sbp.call import as_call, key_of, share_memory
from gpudist.sbp.fresh import FACTORIES
from gpudist.sbp.global_spec import local_of, spec_of
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.pins import Pins
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import name_of
from gpudist.sbp.scope import Scope, place_of_call
from gpudist.sbp.trees import tensors_in


@dataclass(frozen=True)
class TensorInfo:
    """Tensor of a call, without data.

    Attributes:
        shape: global shape.
        dtype: dtype.
        sbp: layout on the placement of the network; ``None`` for a plain tensor, such as a weight.
        requires_grad: whether it requires a gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sbp: NdSbp | None
    requires_grad: bool


class Returned(NamedTuple):
    """Tensor that a function has returned: the number of the function, and its place."""

    node: int
    place: int


@dataclass(frozen=True)
class Node:
    """A function that the forward of a network called on global tensors.

    Attributes:
        path: path of the module whose forward called it.
        name: short name of the function, as in a plan's pins.
        call: number of this call of the function in this module's forward.
        key: equal for calls of the same function with the same arguments and layouts.
        args: positional and named arguments, with slots for tensors.
        inputs: tensors among the arguments, without those on other placements.
        sources: for each of them the result that it is, if a function returned it.
        outputs: results; empty if they are not tensors on the network's placement.
        compute: calls the function with positional and named arguments.
        is_known: whether all tensors of the call are described by ``inputs`` and ``outputs``.
        is_fixed: whether it changes an argument in place, or returns one.
        autocast: makes a context with the autocast of the call.
        checkpoint: activation checkpoint that recomputes it in backward, if any.
    """

    path: str
    name: str
    call: int
    key: object
    args: Any
    inputs: tuple[TensorInfo, ...]
    sources: tuple[Returned | None, ...]
    outputs: tuple[TensorInfo, ...]
    compute: Callable[[Any, Any], Any]
    is_known: bool
    is_fixed: bool
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    checkpoint: object | None = None


class ForwardGraph(Pins):
    """Pins that move nothing, and record all calls of a forward on global tensors.

    Args:
        placement: placement of the network's tensors.

    Attributes:
        nodes: functions, in the order of the forward.
        calls: number of calls by the path and the name of a function.
        tied: pairs of functions that must compute in the same layout, since the second changes
            memory in place that the first has made.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__([])
        self.nodes: list[Node] = []
        self.calls: dict[tuple[str, str], int] = {}
        self.tied: list[tuple[int, int]] = []
        self._placement = placement
        # Tensors are kept so that no other gets their identity.
        self._seen: dict[int, tuple[torch.Tensor, Returned]] = {}
        self._views: set[int] = set()
        self._function: Any = None

    def name_if_pinned(self, function: Any) -> str:
        if self._is_busy or function in FACTORIES:
            return ""
        self._function = function
        return name_of(function).rpartition(".")[2]

    def passes(self, scope: Scope, function: Any) -> bool:
        return False

    def around(
        self, scope: Scope, name: str, args: Any, kwargs: Any, compute: Callable[[Any, Any], Any]
    ) -> Any:
        function, path = self._function, place_of_call(scope)[0]
        number = scope.count_call((path, name))
        self.calls[path, name] = number + 1
        self._is_busy = True
        try:
            if not any(isinstance(x, GlobalTensor) for x in tensors_in((args, kwargs))):
                return compute(args, kwargs)
            # The call may change its arguments in place.
            slots, named, tensors = as_call(function, args, kwargs)
            described = [
                (info, self.source_of(x))
                for x in tensors
                if (info := self._describe(x)) is not None
            ]
            inputs, sources = zip(*described, strict=True) if described else ((), ())
            result = compute(args, kwargs)
        finally:
            self._is_busy = False
        results = tensors_in(result)
        outputs = [self._describe(y) for y in results]
        known = [info for info in outputs if info is not None and info.sbp is not None]
        taken = {id(x) for x in tensors}
        is_fixed = any(id(y) in taken for y in results)
        is_known = len(inputs) == len(tensors) and len(known) == len(results)
        autocast = same_autocast()
        try:
            cast = getattr(autocast, "args", None)
            key: object = (function, key_of((slots, named, inputs)), cast)
        except TypeError:
            key = object()
        at = len(self.nodes)
        self.nodes.append(
            Node(
                path, name, number, key, (slots, named), inputs, sources,
                tuple(known) if is_known else (), compute, is_known, is_fixed, autocast,
                scope.checkpoint if torch.is_grad_enabled() else None,
            )
        )  # fmt: skip
        if is_fixed:
            self._tie(at, sources)
        parts = [local_of(x) for x in tensors]
        if any(share_memory(local_of(y), part) for y in results for part in parts):
            self._views.add(at)
        if is_known:
            for place, y in enumerate(results):
                self._seen[id(y)] = y, Returned(at, place)
        return result

    def source_of(self, x: torch.Tensor) -> Returned | None:
        """Return which result ``x`` is, if a recorded function returned it."""
        tensor, source = self._seen.get(id(x), (None, None))
        return source if tensor is x else None

    def _describe(self, x: torch.Tensor) -> TensorInfo | None:
        if isinstance(x, GlobalTensor):
            how = spec_of(x)
            if how.placement != self._placement:
                return None
            return TensorInfo(how.shape, how.dtype, how.sbp, local_of(x).requires_grad)
        if isinstance(x, OuterTensor) or type(x) in (torch.Tensor, torch.nn.Parameter):
            return TensorInfo(tuple(x.shape), x.dtype, None, x.requires_grad)
        return None

    def _tie(self, at: int, sources: tuple[Returned | None, ...]) -> None:
        """Note that a function in place computes like what has made the memory it changes."""
        first = next((source for source in sources if source is not None), None)
        while first is not None:
            self.tied.append((first.node, at))
            before = self.nodes[first.node]
            at = first.node
            is_alias = before.is_fixed or at in self._views
            first = next((s for s in before.sources if s is not None), None) if is_alias else None
