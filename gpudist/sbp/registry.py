"""The table of operators on global tensors, and the protocol of its entries.

The table is ``signatures``: it maps a function, as passed to ``__torch_function__``, to a
:class:`Rule` or a :class:`Composite`. Decorators create both, in modules of
``gpudist/sbp/signatures``, which its ``__init__`` imports. An operator without an entry raises
``NotImplementedError``.

**A rule** defines how an operator may be computed on *one* axis of workers. It is a function
``rule(call, parts)`` that returns the legal signatures for one axis, in order of preference.
``call`` is a :class:`Call`: the function, its arguments with a :class:`Slot` in place of every
tensor, and the shape and dtype that every tensor has on this axis. ``parts`` is the number of
workers along the axis. A signature is legal if and only if::

    for every index i of the axis: let x_i be the inputs' blocks by ``signature.inputs``; then
    function(x_i, with the arguments of localize(call, AxisPart(parts, i))) is the i-th block, copy
    or term, by ``signature.outputs``, of function(x)

Blocks may be empty. They are balanced, ``n // parts + (i < n % parts)`` cells, or have the sizes of
their attributes. A signature with partial sums among its inputs is legal only if the function is
linear in all of these inputs together, while the other inputs are broadcast or split. So terms
never need to be summed first.

* Every function that computes equal results from equal inputs has the signature of broadcast inputs
  and outputs. The framework appends it; rules do not list it. Functions that draw random numbers
  are registered with ``register(..., replicable=False)``, which omits it.
* Axes are derived one by one, outer axis first. The next axis is given the call of a block: block
  shapes and localized arguments. So a rule never knows of other axes. It is called for every block
  shape that occurs, and a signature is used only if it is legal for all of them.
* ``call.outputs`` has the shapes of outputs, computed by the function itself on meta tensors. Under
  autocast, it also has the dtypes that autocast gives torch's function.
* ``signature.localize`` returns the call with the arguments of a block, where they differ from
  those of the global tensor, such as the sizes of a reshape. Shapes of tensors in the returned call
  are ignored.
* ``signature.run`` is for functions whose blocks cannot be computed from blocks alone.
  ``run(call, tensors, where)`` replaces the function. It is given the local call, the local tensors
  by slot, and a :class:`Where`, whose partition ``where.P`` has the workers to communicate with by
  ``gpudist.ops``. It is called once for all axes whose signature has this ``run``, without axes of
  one worker: there, torch's function computes the block, unless it draws random numbers. Its
  backward must be its adjoint by the library's convention, in which the gradient of a copy is a
  term and the gradient of a term is a copy. Compositions of ``gpudist.ops`` and torch functions
  satisfy this.
* ``signature.bind`` is ``run`` in two steps, for functions that take time to plan: ``bind(call,
  where)`` returns a function of the local tensors, which is cached with the derivation.
* Under autocast, ``run``, ``bind`` and composites compute in the dtypes of torch's function. If its
  results are in single precision, they get their tensors in it, and autocast is off. Otherwise
  autocast is on, and results are cast to torch's dtypes.
* ``signature.nests=False`` limits the signature to one of the axes that split the same dim, if it
  does not work on blocks of blocks. The other axes are boxed.
* ``signature.only_unboxed=True`` limits the signature to inputs that already have its attributes on
  this axis, if workers repeat work under it.
* ``register(..., in_place=True)``: the function modifies its first tensor and returns it. That
  tensor is never boxed: only signatures whose ``inputs[0]`` and ``outputs[0]`` are the tensor's
  attributes are used.
* ``register(..., any_float=True)``: neither signatures nor the shapes and dtypes of results depend
  on the values of float arguments, and no signature has a ``localize``. So a step size that changes
  at every call is not derived again.
* ``register(..., any_cuts=True)``: blocks may be cut anywhere. If an input has explicit sizes, the
  framework adds every signature with these sizes in all its splits, if all split dims have that
  many cells. ``localize`` finds the block by ``part.cells``, ``run`` by ``where``. With
  ``signature.cuts="all"``, only the split dims of inputs must have as many cells; with
  ``"inputs"``, only inputs get the sizes; with ``takes_empty=False``, every block must have cells.
  Signatures that can be cut differently define ``signature.recut``. It takes the sizes of the
  inputs' blocks and returns the signature with explicit sizes, or ``None``. Without ``any_cuts``,
  inputs with explicit sizes are boxed.
* ``register(..., draws_anew=True)``: every signature has a ``run`` or ``bind`` that looks up the
  number of the draw, which its caller has counted, so that a call may be repeated although the
  function draws.
* ``register(..., windows=True)``: the function is worth splitting a replicated tensor for. Within a
  converted network, a large tensor that every worker holds in full is split like the inputs.
* Whether a result shares memory with a tensor of the call is what torch's function says on meta
  tensors with the strides of the whole tensors. Work in place on such a result reaches the tensor,
  or raises; see ``gpudist/sbp/views.py``.

**A composite** is a Python function that takes the same arguments, including global tensors, and
calls other operators: ``_foreach_add_`` is a loop of ``add_``.

The framework uses the first legal signature that needs no boxing. If there is none, it uses the
signature whose boxings move the fewest bytes over all axes and inputs. It checks the shapes of
local outputs against those that the signature implies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box
from gpudist.geometry.layout import NdSbp, split
from gpudist.sbp.call import Call, Compute, Function
from gpudist.world.partition import CartesianPartition


@dataclass(frozen=True)
class AxisPart:
    """One of the workers along an axis.

    Attributes:
        parts: number of workers along the axis.
        index: index of this worker.
        sizes: cells of each block of a split dim; ``None`` if they are balanced.
    """

    parts: int
    index: int
    sizes: tuple[int, ...] | None = None

    def cells(self, extent: int) -> tuple[int, int]:
        """Return start and stop of this worker's block of a dim of ``extent`` cells."""
        return Blocks(extent, self.parts, self.sizes).block(self.index)


@dataclass(frozen=True)
class Where:
    """Context of a ``run``.

    Attributes:
        P: workers that differ from this one along the axes whose signature has the ``run``; of
            length 1 along the other axes.
        call: call with global shapes and arguments.
        inputs: global cells of this rank's block of each tensor.
        outputs: global cells of this rank's block of each result.
        sbps: attributes of each tensor, on all axes.
    """

    P: CartesianPartition
    call: Call
    inputs: tuple[Box, ...]
    outputs: tuple[Box, ...]
    sbps: tuple[NdSbp, ...]

    def cut(self, slot: int) -> tuple[CartesianPartition, Decomposition]:
        """Return the workers of ``P`` with one axis per dim of a tensor, and the tensor's blocks.

        A dim that is split by an axis outside ``P`` has the extent of this worker's block. No two
        axes of ``P`` split the same dim.
        """
        box, shape = self.inputs[slot], self.call.shapes[slot]
        dims = [Blocks(stop - start, 1) for start, stop in zip(box.start, box.stop, strict=True)]
        axis_of: dict[int, int] = {}
        for axis, (attribute, parts) in enumerate(zip(self.sbps[slot], self.P.shape, strict=True)):
            if attribute.is_split and parts > 1:
                axis_of[attribute.dim] = axis
                dims[attribute.dim] = attribute.blocks(shape[attribute.dim], parts)
        order = [axis_of[dim] for dim in sorted(axis_of)]
        rest = [axis for axis in range(self.P.dim) if axis not in order]
        ranks = np.asarray(self.P.ranks).reshape(self.P.shape).transpose(order + rest).flatten()
        members = self.P.world.create_partition_inclusive(ranks.tolist())
        P = members.create_cartesian_topology_partition([blocks.parts for blocks in dims])
        return P, Decomposition(tuple(dims))


Localize = Callable[[Call, AxisPart], Call]
Run = Callable[[Call, Sequence[torch.Tensor], Where], Any]
Bind = Callable[[Call, Where], Compute]


@dataclass(frozen=True)
class SbpSignature:
    """One way to compute a function along one axis.

    Attributes:
        inputs: one ``Sbp`` for each tensor of the call, by slot.
        outputs: one ``Sbp`` for each tensor of the results, in order.
        localize, run, recut, bind, nests, cuts, takes_empty, only_unboxed: see the module
            docstring.
    """

    inputs: NdSbp
    outputs: NdSbp
    localize: Localize | None = None
    run: Run | None = None
    recut: Callable[[tuple[int, ...]], SbpSignature | None] | None = None
    bind: Bind | None = None
    nests: bool = True
    cuts: Literal["all", "inputs"] | None = None
    takes_empty: bool = True
    only_unboxed: bool = False

    def cut(self, sizes: tuple[int, ...]) -> SbpSignature:
        """Return the signature with these sizes of blocks, by ``cuts``."""

        def with_sizes(sbp: NdSbp) -> NdSbp:
            return tuple(
                split(attribute.dim, sizes) if attribute.is_split else attribute
                for attribute in sbp
            )

        outputs = self.outputs if self.cuts == "inputs" else with_sizes(self.outputs)
        return replace(self, inputs=with_sizes(self.inputs), outputs=outputs)

    @property
    def binding(self) -> Bind | None:
        """The ``bind`` of this signature, derived from ``run`` if needed, or ``None``."""
        if self.run is None:
            return self.bind
        return partial(_bind_run, self.run)


def _bind_run(run: Run, call: Call, where: Where) -> Compute:
    return lambda tensors: run(call, tensors, where)


Derive = Callable[[Call, int], Sequence[SbpSignature]]


@dataclass(frozen=True)
class Rule:
    """Entry of an operator with signatures for one axis; see the module docstring."""

    derive: Derive
    in_place: bool = False
    replicable: bool = True
    any_float: bool = False
    any_cuts: bool = False
    windows: bool = False
    draws_anew: bool = False


@dataclass(frozen=True)
class Composite:
    """Entry of a function that is composed of other operators."""

    function: Function


signatures: dict[Function, Rule | Composite] = {}
_Rule = TypeVar("_Rule", bound=Derive)
_Function = TypeVar("_Function", bound=Function)


def register(
    *functions: Function,
    in_place: bool = False,
    replicable: bool = True,
    any_float: bool = False,
    any_cuts: bool = False,
    windows: bool = False,
    draws_anew: bool = False,
) -> Callable[[_Rule], _Rule]:
    """Register a rule for ``functions``; :func:`forms` finds the functions of one name."""

    def enter(derive: _Rule) -> _Rule:
        for function in functions:
            signatures[function] = Rule(
                derive, in_place, replicable, any_float, any_cuts, windows, draws_anew
            )
        return derive

    return enter


def compose(*functions: Function) -> Callable[[_Function], _Function]:
    """Register a composite for ``functions``."""

    def enter(composite: _Function) -> _Function:
        for function in functions:
            signatures[function] = Composite(composite)
        return composite

    return enter


def forms(*names: str, in_place: bool = False) -> list[Function]:
    """Return the functions with these names in torch, ``torch.Tensor`` and ``torch.nn.functional``.

    Args:
        names: names of functions, or of operators, such as ``__add__``.
        in_place: whether to return the functions that change their first tensor instead, as far as
            torch has them: ``add_`` for ``add`` and ``__iadd__`` for ``__add__``.

    Raises:
        AttributeError: torch has no function of that name.
    """
    functions: list[Function] = []
    for name in names:
        is_operator = name.startswith("__")
        if in_place:
            name = f"__i{name[2:]}" if is_operator else f"{name}_"
        # Modules have comparisons of their own.
        modules = () if is_operator else (torch, torch.nn.functional, torch.special)
        of_name = [getattr(room, name) for room in (torch.Tensor, *modules) if hasattr(room, name)]
        if not (of_name or in_place):
            raise AttributeError(f"torch, its tensors, nn.functional and special have no {name!r}")
        functions += of_name
    return functions


def name_of(function: Function) -> str:
    """Return the name of a function of torch."""
    return torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
