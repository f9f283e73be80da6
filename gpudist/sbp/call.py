"""A call of a function of torch, as rules see it: arguments, shapes, and the shapes of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from gpudist.exchange.tracing import outside_torch
from gpudist.nn.autocast import LOW, ShapeOnDevice, device_of
from gpudist.sbp.trees import map_tree, tensors_in
from gpudist.sbp.unneeded_compiler import call_shape_functions_directly

Function = Callable[..., Any]
Compute = Callable[[Sequence[torch.Tensor]], Any]
# Functions that return the shapes and dtypes of results where torch's own function would import its
# compiler, which takes a second and 30 MB.
on_meta: dict[Function, Function] = {}
# Functions that several workers compute parts on CPUs with, where torch's may be slower or wrong.
on_parts: dict[Function, Function] = {}
share_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # pyright: ignore


@dataclass(frozen=True)
class Slot:
    """Placeholder of tensor ``number`` among the arguments."""

    number: int


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor, as rules see it; strides are ``None`` if it is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None

    @property
    def dims(self) -> int:
        return len(self.shape)


class Applied(NamedTuple):
    """A function of tensors that are its first arguments; who is in a hurry calls ``function``."""

    function: Function
    rest: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self.function(*tensors, *self.rest, **self.named)


@dataclass(frozen=True)
class Call:
    """A function and its arguments, in which shape and dtype represent each tensor.

    Attributes:
        function: function of torch.
        args, kwargs: arguments, with a ``Slot`` for each tensor, also within lists and tuples.
        tensors: specs of the tensors by slot, in order of appearance.
        autocast: type of the device of the tensors if autocast is on for it, else ``None``.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Spec, ...]
    autocast: str | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors."""
        return tuple(spec.shape for spec in self.tensors)

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument given at ``position`` or as ``name``, or else ``default``."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def with_argument(self, position: int, name: str, value: Any) -> Call:
        """Return the call with one argument set to ``value``, whether it was given or not."""
        if position < len(self.args):
            args = (*self.args[:position], value, *self.args[position + 1 :])
            return replace(self, args=args)
        return replace(self, kwargs={**self.kwargs, name: value})

    @property
    def in_single_precision(self) -> Call:
        """The call of the tensors in single precision, or better, without autocast."""
        wide = [Spec(s.shape, torch.float32 if s.dtype in LOW else s.dtype) for s in self.tensors]
        return replace(self, tensors=tuple(wide), autocast=None)

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Call:
        """Return the call with different tensor shapes."""
        tensors = zip(shapes, self.tensors, strict=True)
        return replace(self, tensors=tuple(Spec(shape, spec.dtype) for shape, spec in tensors))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the function with ``tensors`` in the slots."""
        args = fill_slots(self.args, tensors)
        return self.function(*args, **fill_slots(self.kwargs, tensors))

    @property
    def as_function(self) -> Compute:
        """The call as a function of the tensors; faster if no tensor is within a list or tuple."""
        function, args, kwargs = self.function, self.args, self.kwargs
        places = [i for i, argument in enumerate(args) if isinstance(argument, Slot)]
        names = [name for name, argument in kwargs.items() if isinstance(argument, Slot)]
        count = len(self.tensors)
        first: Any = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if len(first) == count and all(isinstance(argument, Slot) for argument in first):
            # Tensors within a list, as for cat.
            kind, rest = type(first), args[1:]
            return lambda tensors: function(kind(tensors), *rest, **kwargs)
        if len(places) + len(names) != count:
            return self
        if places == [*range(count)] and not names:
            return Applied(function, args[count:], kwargs)
        # All arguments, picked from the tensors, in their order, and the others.
        arguments = [*args, *kwargs.values()]
        others = [argument for argument in arguments if not isinstance(argument, Slot)]
        numbers = iter(range(count, len(arguments)))
        order = [
            argument.number if isinstance(argument, Slot) else next(numbers)
            for argument in arguments
        ]
        pick = itemgetter(*order, *order[:1])
        if not kwargs:
            return lambda tensors: function(*pick((*tensors, *others))[:-1])
        count_of_args, keys = len(args), list(kwargs)

        def call(tensors: Sequence[torch.Tensor]) -> Any:
            values = pick((*tensors, *others))
            return function(
                *values[:count_of_args], **dict(zip(keys, values[count_of_args:], strict=False))
            )

        return call

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Cache of values derived from this call, so that each rule runs once."""
        return {}

    @cached_property
    def _run(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """The results on meta tensors, and these."""
        call_shape_functions_directly()
        # Modes that count or record calls must not see this one.
        with outside_torch(), torch.no_grad():
            metas: list[torch.Tensor] = [
                torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                if spec.strides is None
                else torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
                for spec in self.tensors
            ]
            stand_in = on_meta.get(self.function)
            if self.autocast is not None:
                device = device_of(self.autocast)
                metas = [ShapeOnDevice.like(meta, device) for meta in metas]
                # Autocast knows only torch's own function, which may refuse empty blocks.
                with suppress(*(() if stand_in is None else (RuntimeError, IndexError))):
                    return self(metas), metas
            return replace(self, function=stand_in or self.function)(metas), metas

    @cached_property
    def outputs(self) -> tuple[Spec, ...]:
        """Specs of the tensors among the results, computed on meta tensors."""
        return tuple(Spec(tuple(y.shape), y.dtype, strides_of(y)) for y in tensors_in(self._run[0]))

    @cached_property
    def aliases(self) -> tuple[int | None, ...]:
        """For each tensor among the results, the slot of the tensor whose memory it shares."""
        results, metas = self._run
        return tuple(
            next((i for i, x in enumerate(metas) if share_memory(y, x)), None)
            for y in tensors_in(results)
        )

    @cached_property
    def tree(self) -> Any:
        """The results, with each tensor replaced by a ``Slot``."""
        number = count()
        return map_tree(
            self._run[0], lambda y: Slot(next(number)) if isinstance(y, torch.Tensor) else y
        )


def strides_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of ``x``, ``None`` if it is contiguous."""
    return None if x.is_contiguous() else x.stride()


def new_as_in(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a meta tensor of another shape, whose dims have the order in memory of ``x``.

    It is contiguous if ``x`` is, or has another number of dims.
    """
    order = list(range(len(shape)))
    if x.dim() == len(shape) and not x.is_contiguous():
        order.sort(key=lambda d: -x.stride(d))
    return torch.empty_permuted(shape, order, dtype=x.dtype, device="meta")


def fill_slots(tree: Any, tensors: Sequence[Any]) -> Any:
    """Return ``tree`` with its slots replaced by tensors."""
    return map_tree(tree, lambda leaf: tensors[leaf.number] if isinstance(leaf, Slot) else leaf)


# Types whose values never change, and compute alike if they are equal.
_CONSTANTS = (
    str, bytes, type(None), type(...), Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, Slot, Spec,
)  # fmt: skip


def key_of(tree: Any, any_float: bool = False) -> Any:
    """Return a hashable key of the arguments; keys are equal if and only if the arguments are.

    Args:
        tree: arguments: numbers, strings, dtypes and the like, layouts and other frozen
            dataclasses, and sequences, dicts and slices of these.
        any_float: whether to treat all floats as equal.

    Raises:
        TypeError: an argument is of another type, so that it might change, or compute something
            else although it is equal.
    """
    if isinstance(tree, (bool, int, float, complex)):
        is_float = isinstance(tree, (float, complex))
        return type(tree) if any_float and is_float else (type(tree), repr(tree))
    if isinstance(tree, _CONSTANTS):
        return type(tree), tree
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple(key_of(part, any_float) for part in tree)
    if isinstance(tree, dict):
        return dict, tuple((key_of(name), key_of(part, any_float)) for name, part in tree.items())
    if isinstance(tree, slice):
        return slice, key_of((tree.start, tree.stop, tree.step))
    if is_dataclass(tree) and tree.__dataclass_params__.frozen:  # pyright: ignore
        parts = [getattr(tree, field.name) for field in fields(tree) if field.compare]
        return type(tree), tuple(key_of(part) for part in parts)
    raise TypeError(
        f"a {type(tree).__qualname__} may change, or compute something else although it is equal; "
        "only numbers, strings, dtypes and the like, and tuples, lists and dicts of these, stand "
        "for themselves"
    )


def as_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments with slots in place of tensors, and the tensors."""
    tensors: list[torch.Tensor] = []

    def slot(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    return map_tree(args, slot), map_tree(kwargs, slot), tensors
