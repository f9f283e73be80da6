"""Layouts that a plan prescribes, of what modules and functions of a network take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpudist.errors import ConversionError
from gpudist.geometry.layout import NdSbp, broadcast
from gpudist.sbp import views
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import OuterTensor
from gpudist.sbp.placement import Placement
from gpudist.sbp.registry import name_of
from gpudist.sbp.scope import Scope, current_scope, path_of_call
from gpudist.sbp.trees import tensors_in

End = Literal["input", "output"]
_PINNED = (GlobalTensor, OuterTensor)


@dataclass(frozen=True)
class Pin:
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

    def move(self, tree: Any) -> Any:
        """Return ``tree`` with its first global tensor in the pinned layout.

        Raises:
            ConversionError: the tensor does not have the dims that the pin splits.
        """
        leaves, how = tree_flatten(tree, is_leaf=lambda x: isinstance(x, torch.Size))
        for i, x in enumerate(leaves):
            if isinstance(x, _PINNED):
                leaves[i] = self._move_tensor(x)
                return tree if leaves[i] is x else tree_unflatten(leaves, how)
        return tree

    def _move_tensor(self, x: GlobalTensor | OuterTensor) -> torch.Tensor:
        dims = [attribute.dim for attribute in self.sbp if attribute.dim >= x.dim()]
        if dims or self.pin.dims not in (None, x.dim()):
            raise ConversionError(
                f"plan: {self.pin}, but the {self.pin.at} has shape {list(x.shape)}; "
                + (f"it has no dim {dims[0]}" if dims else "give one axis for each dim")
            )
        if isinstance(x, OuterTensor):
            if all(attribute == broadcast for attribute in self.sbp):
                return x
            # Further uses of what is not made yet must see what becomes of this tensor in place.
            base: Any = x.materialize_for_change()
        else:
            base = x
        target = self.placement.layout(self.sbp, tuple(base.shape))
        if base.placement == self.placement and base.global_layout == target:
            return base

        def make() -> GlobalTensor:
            return base.to_global(self.placement, self.sbp)

        moved = make()
        scope = current_scope()
        if scope is not None:
            scope.moves += 1
        # In torch, what the network changes in place here is the tensor itself.
        vars(base)["_has_views"] = True
        views.link(moved, views.EmulatedView(base, make, base.copy_, True))
        return moved


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
                args, kwargs = placed.move((args, kwargs))
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
        return self._move_tensor("input", (args, kwargs))

    def after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Move the first global tensor in the result, as a hook after the forward."""
        return self._move_tensor("output", output)

    def _move_tensor(self, at: End, tree: Any) -> Any:
        scope = current_scope()
        if scope is None:
            return tree
        number = scope.count_call((self.pins[0].pin.path, at))
        for placed in self.pins:
            if placed.pin.at == at and placed.pin.call in (None, number):
                tree = placed.move(tree)
        return tree
