"""Layouts that a plan prescribes, of what modules and functions of a network take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpudist.cache import Cache
from gpudist.checks.arguments import Checked
from gpudist.errors import ConversionError
from gpudist.geometry.layout import NdSbp, broadcast
from gpudist.sbp import views
from gpudist.sbp.boxing import box
from gpudist.sbp.global_spec import GlobalSpec, global_spec, spec_of, wrap
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import name_of
from gpudist.sbp.scope import Scope, current_scope, path_of_call
from gpudist.sbp.trees import tensors_in

End = Literal["input", "output"]
_PINNED = (GlobalTensor, OuterTensor)


@dataclass(frozen=True)
class Pin(Checked):
    """Layout that a plan prescribes for one tensor of a network.

    The tensor is the first global one among the arguments, or in the result. A function with a
    pinned argument keeps its layout, and takes other arguments in the layouts that go with it.

    Attributes:
        path: path of the module, or of the module whose forward calls the function.
        sbp: one attribute per axis of ``grid``, outer axis first.
        at: whether the tensor is an argument or a result.
        call: number of the call within a forward of the network; ``None`` for every call.
        function: name of the function, such as ``"cat"``; empty for the module itself.
        grid: shape of the grid, on the first workers of the network; ``None`` for the network's.
        dims: number of dims that the tensor must have; ``None`` for any.
    """

    path: str
    sbp: NdSbp
    at: End = "output"
    call: int | None = None
    function: str = ""
    grid: tuple[int, ...] | None = None
    dims: int | None = None

    def __str__(self) -> str:
        """Describe the pin in a line."""
        where = f"{self.path or 'the network'}"
        where += f", {self.function}" if self.function else ""
        where += "" if self.call is None else f", call {self.call}"
        on = "" if self.grid is None else f" on {list(self.grid)}"
        return f"{where}, {self.at}: ({', '.join(map(repr, self.sbp))}){on}"


@dataclass(frozen=True)
class PlacedPin:
    """A pin on the workers of a network.

    Attributes:
        pin: the pin.
        placement: workers, without axes of one worker.
        sbp: attributes along the axes of the placement.
    """

    pin: Pin
    placement: Placement
    sbp: NdSbp
    # Specs of moved tensors, by those of the tensors before.
    _targets: Cache[GlobalSpec, GlobalSpec] = field(
        default_factory=Cache, compare=False, repr=False
    )

    def move(self, tree: Any) -> Any:
        """Return ``tree`` with its first global tensor in the pinned layout.

        Raises:
            ConversionError: the tensor does not have the dims that the pin splits.
        """
        if isinstance(tree, _PINNED):
            return self._move_tensor(tree)
        leaves, how = tree_flatten(tree, is_leaf=lambda x: isinstance(x, torch.Size))
        for i, x in enumerate(leaves):
            if isinstance(x, _PINNED):
                leaves[i] = self._move_tensor(x)
                return tree if leaves[i] is x else tree_unflatten(leaves, how)
        return tree

    def move_among(self, args: Any, kwargs: Any) -> Any:
        """Return arguments with their first global tensor in the pinned layout."""
        if args and isinstance(args[0], _PINNED):
            return (self._move_tensor(args[0]), *args[1:]), kwargs
        return self.move((args, kwargs))

    def _move_tensor(self, x: GlobalTensor | OuterTensor) -> torch.Tensor:
        base: Any = x
        if isinstance(x, OuterTensor):
            self._require_dims(tuple(x.shape))
            if all(attribute == broadcast for attribute in self.sbp):
                return x
            # Further uses of what is not made yet must see what becomes of this tensor in place.
            base = x.materialize_for_change()
        source = spec_of(base)
        # The same object if the tensor need not move.
        target = self._targets.get_or_make(source, lambda: self._spec_if_moved(source))
        if target is source:
            return base

        def make(base: Any) -> GlobalTensor:
            scope = current_scope()
            if scope is not None and scope.record is not None:
                return base.to_global(self.placement, self.sbp)
            # A view whose base has changed computes its cells by torch's functions.
            part = base._local
            # A network's interception must not take a tensor made here for one of the forward.
            with torch._C.DisableTorchFunction():
                world = self.placement.partition.world
                local = box(part, source.layout, target.layout, world)
                return wrap(GlobalTensor, local, target)

        moved = make(base)
        scope = current_scope()
        if scope is not None:
            scope.moves += 1
        # In torch, what the network changes in place here is the tensor itself.
        vars(base)["_has_views"] = True
        views.link(moved, views.EmulatedView(base, make, torch.Tensor.copy_, True))
        return moved

    def _spec_if_moved(self, source: GlobalSpec) -> GlobalSpec:
        self._require_dims(source.shape)
        target = global_spec(self.placement, self.sbp, source.shape, source.dtype, source.strides)
        is_there = source.placement == self.placement and source.layout == target.layout
        return source if is_there else target

    def _require_dims(self, shape: tuple[int, ...]) -> None:
        dims = [attribute.dim for attribute in self.sbp if attribute.dim >= len(shape)]
        if dims or self.pin.dims not in (None, len(shape)):
            raise ConversionError(
                f"plan: {self.pin}, but the {self.pin.at} has shape {list(shape)}; "
                + (f"it has no dim {dims[0]}" if dims else "give one axis for each dim")
            )


class Pins:
    """The pins of a network, which moves tensors at those of functions.

    Args:
        pins: pins of modules and functions.

    Attributes:
        unpinned: functions called so far without pins on any path.
    """

    def __init__(self, pins: Sequence[PlacedPin]) -> None:
        self._all = [placed.pin for placed in pins]
        self._by_place: dict[tuple[str, str], list[PlacedPin]] = {}
        for placed in pins:
            if placed.pin.function:
                self._by_place.setdefault((placed.pin.path, placed.pin.function), []).append(placed)
        self._names: dict[Any, str] = {}
        self.unpinned = set[Any]()
        self._is_busy = False

    def __deepcopy__(self, memo: Any) -> Pins:
        return self

    def name_if_pinned(self, function: Any) -> str:
        """Return the short name of a function that has pins, else an empty text."""
        if self._is_busy:
            return ""
        name = self._names.get(function)
        if name is None:
            short = name_of(function).rpartition(".")[2]
            is_pinned = any(short == pinned for _, pinned in self._by_place)
            name = self._names[function] = short if is_pinned else ""
            if not is_pinned:
                self.unpinned.add(function)
        return name

    def passes(self, scope: Scope, function: Any) -> bool:
        """Return whether no pin is for this call of a function, which is then counted."""
        name = self.name_if_pinned(function)
        if not name:
            return True
        # The frames of this method and of its caller are not the network's.
        place = path_of_call(scope, 3), name
        if place in self._by_place:
            return False
        scope.count_call(place)
        return True

    def unreached(self, calls: Mapping[tuple[str, str], int]) -> list[str]:
        """Describe each pin that a forward with these calls has not reached.

        Args:
            calls: number of calls by path and function, or ``"input"`` and ``"output"``.
        """
        texts: list[str] = []
        for pin in self._all:
            count = calls.get((pin.path, pin.function or pin.at), 0)
            if count > (pin.call or 0):
                continue
            others = [path or "the network" for path, name in calls if name == pin.function]
            if count:
                last = f"call {count - 1}" if count > 1 else "call 0"
                texts.append(f"{pin}: the last in a forward is {last}")
            elif others:
                texts.append(f"{pin}: {pin.function} is called by {', '.join(others[:3])}")
            else:
                texts.append(f"{pin}: the forward does not call it")
        return texts

    def around(
        self, scope: Scope, name: str, args: Any, kwargs: Any, compute: Callable[[Any, Any], Any]
    ) -> Any:
        """Call ``compute(args, kwargs)`` with the pinned layouts of the function ``name``."""
        self._is_busy = True
        try:
            place = path_of_call(scope), name
            number = scope.count_call(place)
            pins = self._by_place.get(place)
            if pins is None:
                return compute(args, kwargs)
            of_call = [placed for placed in pins if placed.pin.call in (None, number)]
            inputs = [placed for placed in of_call if placed.pin.at == "input"]
            for placed in inputs:
                args, kwargs = placed.move_among(args, kwargs)
            result = (_hold_layout(compute) if inputs else compute)(args, kwargs)
            for placed in of_call:
                if placed.pin.at == "output":
                    result = placed.move(result)
            return result
        finally:
            self._is_busy = False


def _hold_layout(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the function with operators that keep the layout of the first global tensor."""

    def compute_held(args: Any, kwargs: Any) -> Any:
        pinned = (x for x in tensors_in([args, kwargs]) if isinstance(x, _PINNED))
        x = next(pinned, None)
        if not isinstance(x, GlobalTensor):
            return compute(args, kwargs)
        how = x._global_spec
        x._global_spec = how.held
        try:
            result = compute(args, kwargs)
        finally:
            x._global_spec = how
        for y in tensors_in(result):
            # Such as a part of the same tensor.
            if isinstance(y, GlobalTensor) and y._global_spec is how.held:
                y._global_spec = how
        return result

    return compute_held


class PinHook:
    """Hook that moves what a module takes or returns to the pinned layouts, within a network."""

    def __init__(self, pins: Sequence[PlacedPin]) -> None:
        self.pins = pins

    def __deepcopy__(self, memo: Any) -> PinHook:
        return self

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Move the first global tensor among the arguments, as a hook before the forward."""
        for placed in self._pins_of_next_call("input"):
            args, kwargs = placed.move_among(args, kwargs)
        return args, kwargs

    def after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Move the first global tensor in the result, as a hook after the forward."""
        for placed in self._pins_of_next_call("output"):
            output = placed.move(output)
        return output

    def _pins_of_next_call(self, at: End) -> list[PlacedPin]:
        scope = current_scope()
        if scope is None:
            return []
        number = scope.count_call((self.pins[0].pin.path, at))
        return [
            placed for placed in self.pins
            if placed.pin.at == at and placed.pin.call in (None, number)
        ]  # fmt: skip
