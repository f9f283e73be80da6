"""The one table of operators on global tensors, and the protocol of its entries.

The table is ``signatures``: from a function, as ``__torch_function__`` is given it, to a
:class:`Rule` or a :class:`Composite`. Both are made by decorators, in modules of
``gpudist/sbp/signatures``, which its ``__init__`` imports. An operator without an entry raises
``NotImplementedError``.

**A rule** says how an operator may be carried out on *one* axis of workers. It is a function
``rule(call, parts)`` that returns the legal one-axis signatures, the preferred ones first. ``call``
is a :class:`Call`: the function, its arguments with a :class:`Slot` in place of every tensor, and
shape and dtype of every tensor as the axis sees them. ``parts`` is the number of workers along the
axis. A signature is legal exactly if::

    for every index i of the axis: let x_i be the inputs' blocks by ``signature.inputs``; then
    function(x_i, with the arguments of localize(call, Part(parts, i))) is the i-th block, copy or
    term, by ``signature.outputs``, of function(x)

where blocks are balanced, ``n // parts + (i < n % parts)`` cells, or have the sizes that its
attributes say, and may be empty. A signature with a partial sum among its inputs is legal only if
the function is linear in all of the inputs that are partial sums together, the others broadcast or
split, so that terms need never be complete.

* The signature of broadcast inputs and outputs is legal for every function that computes the same
  from the same inputs. It is added by the framework, last; rules do not list it. ``register(...,
  replicable=False)`` leaves it out, for functions that draw random numbers.
* On N axes each is derived on its own, the outer first. To the next axis the framework shows the
  call of a block: block shapes, localised arguments. So a rule never knows of other axes, and is
  asked about every block shape that occurs; a signature counts if it is legal for all of them.
* Shapes of outputs come from the function itself, run on meta tensors: ``call.outputs``.
* ``signature.localize``: the call with the arguments of a block, where they differ from those of
  the whole, such as sizes of a reshape. The tensors' shapes in it are ignored.
* ``signature.run``: for a function whose blocks are not computed from blocks alone, ``run(call,
  tensors, where)`` in place of the function: given the local call, the local tensors by slot, and
  :class:`Where`, with the partition ``where.P`` of the workers to communicate with, by
  ``gpudist.ops``. One call for all axes whose signature has this ``run``. Its backward must be its
  adjoint by the library's convention: the gradient of a copy is a term, of a term a copy, so that
  compositions of ``gpudist.ops`` and torch functions are right as they are.
* ``signature.bind``: the same in two steps: ``bind(call, where)`` gives what is called with the
  local tensors, and is remembered with the derivation: for what takes time to plan.
* ``signature.nests=False``: of the axes that split a dim as this signature does, only one may have
  it: blocks of blocks are boxed.
* ``register(..., in_place=True)``: the function changes its first tensor and returns it. The
  tensor is never boxed: signatures whose ``inputs[0]`` and ``outputs[0]`` are not what it has are
  left out.
* ``register(..., any_float=True)``: the values of floats among the arguments change neither
  signatures nor results' shapes and dtypes, and no signature has a ``localize``. So a step size
  that is new at every call derives nothing anew.
* ``register(..., any_cuts=True)``: blocks may be cut anywhere. Where an input has explicit sizes,
  the framework adds every signature with these sizes in all its splits, if all dims that are split
  have that many cells. ``localize`` finds the block by ``part.cells``, ``run`` by ``where``. A
  signature that would be wrong then, or that can be cut otherwise, says so by
  ``signature.recut``: given the sizes of the inputs' blocks, it returns the signature with
  explicit sizes, or None. Without ``any_cuts``, inputs with explicit sizes are boxed.
* ``register(..., windows=True)``: the function is worth cutting a whole tensor for: within a
  converted network, a large one of which every worker has a copy is cut as the inputs are.
* ``register(..., view=True)``: the result shares its input's memory. If the input is boxed, or the
  signature has a ``run``, it does not, and functions in place on it raise.

**A composite** is a Python function of the same arguments, global tensors among them, that calls
other operators: ``_foreach_add_`` as a loop of ``add_``.

Of the legal signatures the framework takes the first that fits the inputs as they are; else that
whose boxings, over all axes and inputs, move the fewest bytes. Local outputs are checked against
the shapes that the signature says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch

from gpudist.exchange.library import outside_torch
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box
from gpudist.sbp.attributes import NdSbp, Sbp
from gpudist.sbp.trees import mapped, tensors_in
from gpudist.world.partition import CartesianPartition

Function = Callable[..., Any]


@dataclass(frozen=True)
class Slot:
    """The place of tensor ``number`` among the arguments."""

    number: int


@dataclass(frozen=True)
class Spec:
    """What a rule knows of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def dims(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Part:
    """One of the workers along an axis.

    Attributes:
        sizes: cells of each block of the dims that are split, ``None`` if they are balanced.
    """

    parts: int
    index: int
    sizes: tuple[int, ...] | None = None

    def cells(self, extent: int) -> tuple[int, int]:
        """Start and stop of this worker's block of a split dim of ``extent`` cells."""
        return Sbp("split", 0, self.sizes).cells(extent, self.parts, self.index)


@dataclass(frozen=True)
class Call:
    """A function and its arguments, tensors known by shape and dtype alone.

    Attributes:
        args, kwargs: as given, with a ``Slot`` for each tensor, also within lists and tuples.
        tensors: by slot, in order of appearance.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Spec, ...]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tensors."""
        return tuple(spec.shape for spec in self.tensors)

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position``, or of that name, or the ``default``."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def has(self, position: int, name: str) -> bool:
        """Whether an argument is given."""
        return position < len(self.args) or name in self.kwargs

    def replaced(self, position: int, name: str, value: Any) -> Call:
        """The call with another value of one argument, which may be missing so far."""
        if position < len(self.args):
            args = (*self.args[:position], value, *self.args[position + 1 :])
            return replace(self, args=args)
        return replace(self, kwargs={**self.kwargs, name: value})

    def with_args(self, *args: Any) -> Call:
        """The call with other positional arguments."""
        return replace(self, args=args)

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Call:
        """The call on tensors of other shapes."""
        tensors = zip(shapes, self.tensors, strict=True)
        return replace(self, tensors=tuple(Spec(shape, spec.dtype) for shape, spec in tensors))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the function gives for ``tensors`` in the slots."""
        args = filled(self.args, tensors)
        return self.function(*args, **filled(self.kwargs, tensors))

    @property
    def ready(self) -> Compute:
        """The call as a function of the tensors; quick if each is an argument of its own."""
        function, args, kwargs = self.function, self.args, self.kwargs
        places = [i for i, one in enumerate(args) if isinstance(one, Slot)]
        names = [name for name, one in kwargs.items() if isinstance(one, Slot)]
        count = len(self.tensors)
        first: Any = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        if len(first) == count and all(isinstance(one, Slot) for one in first):
            # As of cat.
            kind, rest = type(first), args[1:]
            return lambda tensors: function(kind(tensors), *rest, **kwargs)
        if len(places) + len(names) != count:
            return self
        if len(places) == len(args) and not kwargs:
            return lambda tensors: function(*tensors)
        own = list(args)

        def call(tensors: Sequence[torch.Tensor]) -> Any:
            given = own.copy()
            parts = iter(tensors)
            for place in places:
                given[place] = next(parts)
            if not names:
                return function(*given, **kwargs)
            named = kwargs.copy()
            for name in names:
                named[name] = next(parts)
            return function(*given, **named)

        return call

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What was derived from this call: a rule is asked once."""
        return {}

    @cached_property
    def _results(self) -> Any:
        dtypes = [spec.dtype for spec in self.tensors]
        if torch._C._is_any_autocast_enabled():  # pyright: ignore
            # Which does not reach meta tensors: whatever is mixed becomes alike.
            floats = [dtype for dtype in dtypes if dtype.is_floating_point]
            widest = max(floats, key=lambda dtype: dtype.itemsize, default=None)
            dtypes = [widest if d.is_floating_point and widest else d for d in dtypes]
        pairs = zip(self.tensors, dtypes, strict=True)
        with outside_torch():
            metas = [torch.empty(spec.shape, dtype=dtype, device="meta") for spec, dtype in pairs]
        # Nobody who counts or records is to see it.
        with outside_torch(), torch.no_grad():
            return replace(self, function=on_meta.get(self.function, self.function))(metas)

    @cached_property
    def outputs(self) -> tuple[Spec, ...]:
        """The tensors among the results, from the function run on meta tensors."""
        return tuple(Spec(tuple(y.shape), y.dtype) for y in tensors_in(self._results))

    @cached_property
    def tree(self) -> Any:
        """The results, with a ``Slot`` for each tensor."""
        number = count()
        return mapped(
            self._results, lambda y: Slot(next(number)) if isinstance(y, torch.Tensor) else y
        )


@dataclass(frozen=True)
class Where:
    """What a ``run`` knows of its surroundings.

    Attributes:
        P: the workers that differ from this one along the axes whose signature has the ``run``, of
            shape 1 along the others.
        call: the call with global shapes and arguments.
        inputs: the global cells that this rank's block of each tensor has.
        outputs: the same of each result.
        sbps: of each tensor, on all axes.
    """

    P: CartesianPartition
    call: Call
    inputs: tuple[Box, ...]
    outputs: tuple[Box, ...]
    sbps: tuple[NdSbp, ...]

    def cut(self, slot: int) -> tuple[CartesianPartition, Decomposition]:
        """How ``P`` cuts a tensor: its workers on a grid with one axis a dim, and the blocks.

        What axes outside of ``P`` split is of the size that this worker has. No two axes of ``P``
        split the same dim.
        """
        box, shape = self.inputs[slot], self.call.shapes[slot]
        dims = [Blocks(stop - start, 1) for start, stop in zip(box.start, box.stop, strict=True)]
        axis_of: dict[int, int] = {}
        for axis, (one, parts) in enumerate(zip(self.sbps[slot], self.P.shape, strict=True)):
            if one.is_split and parts > 1:
                axis_of[one.dim] = axis
                sizes = [
                    b - a for a, b in (one.cells(shape[one.dim], parts, i) for i in range(parts))
                ]
                dims[one.dim] = Blocks.of_sizes(sizes)
        order = [axis_of[dim] for dim in sorted(axis_of)]
        rest = [axis for axis in range(self.P.dim) if axis not in order]
        ranks = np.asarray(self.P.ranks).reshape(self.P.shape).transpose(order + rest).flatten()
        members = self.P.world.create_partition_inclusive(ranks.tolist())
        P = members.create_cartesian_topology_partition([blocks.parts for blocks in dims])
        return P, Decomposition(tuple(dims))


Localize = Callable[[Call, Part], Call]
Run = Callable[[Call, Sequence[torch.Tensor], Where], Any]
Compute = Callable[[Sequence[torch.Tensor]], Any]
Bind = Callable[[Call, Where], Compute]


@dataclass(frozen=True)
class Signature:
    """One way to carry out a function along one axis.

    Attributes:
        inputs: one ``Sbp`` for each tensor of the call, by slot.
        outputs: one for each tensor of the results, in order.
        localize, run, recut, bind, nests: see the module.
    """

    inputs: NdSbp
    outputs: NdSbp
    localize: Localize | None = None
    run: Run | None = None
    recut: Callable[[tuple[int, ...]], Signature | None] | None = None
    bind: Bind | None = None
    nests: bool = True

    @property
    def binding(self) -> Bind | None:
        """How it is carried out, if not by the function on the blocks."""
        if self.run is None:
            return self.bind
        return partial(_bind_run, self.run)


def _bind_run(run: Run, call: Call, where: Where) -> Compute:
    return lambda tensors: run(call, tensors, where)


Derive = Callable[[Call, int], Sequence[Signature]]


@dataclass(frozen=True)
class Rule:
    """The entry of an operator: its one-axis signatures; see the module."""

    derive: Derive
    in_place: bool = False
    replicable: bool = True
    any_float: bool = False
    view: bool = False
    any_cuts: bool = False
    windows: bool = False


@dataclass(frozen=True)
class Composite:
    """The entry of a function that is made of other operators."""

    function: Function


signatures: dict[Function, Rule | Composite] = {}
# What tells shapes and dtypes of results where torch's own function would import its compiler,
# which takes a second and 30 MB.
on_meta: dict[Function, Function] = {}

_Rule = TypeVar("_Rule", bound=Derive)
_Function = TypeVar("_Function", bound=Function)


def register(
    *functions: Function,
    in_place: bool = False,
    replicable: bool = True,
    any_float: bool = False,
    view: bool = False,
    any_cuts: bool = False,
    windows: bool = False,
) -> Callable[[_Rule], _Rule]:
    """Enter a rule for ``functions``; :func:`forms` finds those of one name."""

    def enter(derive: _Rule) -> _Rule:
        for function in functions:
            signatures[function] = Rule(
                derive, in_place, replicable, any_float, view, any_cuts, windows
            )
        return derive

    return enter


def compose(*functions: Function) -> Callable[[_Function], _Function]:
    """Enter a composite for ``functions``."""

    def enter(composite: _Function) -> _Function:
        for function in functions:
            signatures[function] = Composite(composite)
        return composite

    return enter


def forms(*names: str) -> list[Function]:
    """The functions of these names in torch, ``torch.Tensor`` and ``torch.nn.functional``.

    Raises:
        AttributeError: there is none.
    """
    found: list[Function] = []
    for name in names:
        rooms = (torch, torch.Tensor, torch.nn.functional, torch.special)
        here = [getattr(room, name) for room in rooms if hasattr(room, name)]
        if not here:
            raise AttributeError(f"torch has no function {name!r}")
        found += here
    return found


def name_of(function: Function) -> str:
    """A function of torch by its name."""
    return torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))


def filled(tree: Any, tensors: Sequence[Any]) -> Any:
    """``tree`` with tensors in its slots."""
    return mapped(tree, lambda leaf: tensors[leaf.number] if isinstance(leaf, Slot) else leaf)
