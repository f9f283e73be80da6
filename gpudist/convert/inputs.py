"""Convert the inputs of a network to global tensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from gpudist.checks.bits import digest_unless_constant
from gpudist.checks.storage import is_about_dtypes
from gpudist.errors import ConversionError, ShapeError, TransportError
from gpudist.geometry.layout import broadcast, split
from gpudist.ops.shape_agreement import BlockLayout, ShapeAgreement
from gpudist.sbp.call import new_as_in
from gpudist.sbp.global_spec import GlobalSpec, global_spec, on_axes_of, wrap, wrap_copies
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.placement import Placement
from gpudist.sbp.scope import Scope
from gpudist.sbp.unknown import place_of_call
from gpudist.world.host_channel import host_partition
from gpudist.world.partition import CartesianPartition

_IN_PLACE = (
    "The network was converted in place by gpudist.distribute, and takes blocks; to call the "
    "sequential one with whole tensors, convert a copy.deepcopy of it"
)
Kind = Literal["block", "whole", "dynamic", "split"]
Inputs = Mapping[str, Kind | Sequence[int]]


class Entrance:
    """Converter of a network's input blocks to global tensors.

    A plain tensor with as many dims as ``P_x`` has axes is this worker's block; any other is whole,
    that is, equal on every worker. Ranks agree on the shape of a block at the first call with
    gradients, and at every call without. Where ``inputs`` does not name the block, they compare its
    digest whenever they agree on another shape: equal blocks that are not constant raise. In place
    of a block, ranks outside ``P_x`` pass an empty tensor.

    Args:
        P_x: partition of the inputs that are blocks, one axis for each of their dims.
        inputs: kinds of inputs by name, where the default does not fit: ``"block"``, ``"whole"``,
            ``"dynamic"`` (a block whose global shape the ranks agree on at every call), ``"split"``
            (equal on every worker, which takes its block of it), or the global shape of a block.
    """

    def __init__(self, P_x: CartesianPartition, inputs: Inputs) -> None:
        self.P_x, self.inputs = P_x, dict(inputs)
        self.axes = [axis for axis, n in enumerate(P_x.shape) if n > 1]
        grid = [P_x.shape[axis] for axis in self.axes] or [1]
        members = P_x.world.create_partition_inclusive(list(P_x.ranks))
        self.placement = Placement.of(members.create_cartesian_topology_partition(grid))
        self._has_warned = False
        # By name, number and whether ranks agree at every call.
        self._agreements: dict[tuple[str, int, bool], ShapeAgreement] = {}
        self._layouts: dict[tuple[str, int], BlockLayout] = {}
        self._specs: dict[tuple[str, int], tuple[BlockLayout, GlobalSpec]] = {}

    def __deepcopy__(self, memo: Any) -> Entrance:
        return Entrance(self.P_x, self.inputs)

    def kind_of(self, name: str, x: torch.Tensor) -> Kind | Sequence[int]:
        """Return the kind of a plain tensor."""
        kind = self.inputs.get(name)
        if kind is not None:
            return kind
        is_placeholder = not self.P_x.active and not x.numel()
        return "block" if is_placeholder or x.dim() == self.P_x.dim else "whole"

    def is_held_by_all(self, name: str, x: torch.Tensor) -> bool:
        """Return whether every worker passes the whole tensor."""
        return not isinstance(x, GlobalTensor) and self.kind_of(name, x) in ("whole", "split")

    def __call__(
        self, name: str, x: torch.Tensor, number: int = 0, is_first: bool = False
    ) -> torch.Tensor:
        """Return a block as a global tensor, and any other input unchanged.

        Collective over the world if the global shape is unknown, or without gradients.

        Args:
            name: argument name of the input.
            x: the input.
            number: number of tensors that precede it in the same argument, such as a list.
            is_first: whether no block precedes this input, which must therefore be one.

        Raises:
            ShapeError: on every rank alike, if the input could be a block as well as the whole
                tensor, and ``inputs`` does not say which.
        """
        if isinstance(x, GlobalTensor):
            same = on_axes_of(x, self.placement)
            return x if same is None else same
        kind = self.kind_of(name, x)
        if kind == "whole":
            return x
        if kind == "split":
            return self._split_whole(name, x)
        layout = self._layout(name, number, kind, x)
        if name not in self.inputs and not is_first:
            self._require_cut(name, layout)
        local = x.view_as(x)
        if not self.P_x.active:
            local = x.reshape(-1)[:0].to(layout.dtype)
            if layout.requires_grad != local.requires_grad:
                local = local.detach().requires_grad_(bool(layout.requires_grad))
        last, how = self._specs.get((name, number), (None, None))
        blocks = layout.decomposition
        strides = None if local.is_contiguous() else new_as_in(local, blocks.shape).stride()
        made = (local.dtype, strides)
        if last is not layout or how is None or (how.dtype, how.strides) != made:
            sbp = tuple(split(axis, blocks.dims[axis].lengths) for axis in self.axes)
            how = global_spec(self.placement, sbp or (broadcast,), blocks.shape, *made)
            self._specs[name, number] = layout, how
        return wrap(GlobalTensor, local, how)

    def _split_whole(self, name: str, x: torch.Tensor) -> GlobalTensor:
        """Return a tensor that every worker holds as balanced blocks."""
        if x.dim() != self.P_x.dim:
            raise ShapeError(
                f"input {name!r} has shape {list(x.shape)}; 'split' needs one dim for each of the "
                f"{self.P_x.dim} axes of P_x, which has the shape {list(self.P_x.shape)}"
            )
        whole = wrap_copies(GlobalTensor, x.view_as(x), self.placement)
        return whole.to_global(sbp=tuple(split(axis) for axis in self.axes) or whole.sbp)

    def _layout(
        self, name: str, number: int, kind: Kind | Sequence[int], x: torch.Tensor
    ) -> BlockLayout:
        """Return the layout of the tensor with block ``x``.

        The layout with gradients is kept beside the one without, so that training continues after
        an evaluation of other sizes. No rank can wait for another within a capture.
        """
        is_dynamic = kind == "dynamic" or (isinstance(kind, str) and not torch.is_grad_enabled())
        key = name, number, is_dynamic
        if key not in self._agreements:
            self._agreements[key] = self._agreement(name, kind, is_dynamic)
        agreement, last = self._agreements[key], self._layouts.get((name, number))
        if last is not None and is_dynamic and _is_captured(x):
            return agreement.adapt(last, x)
        try:
            layout = self._layouts[name, number] = agreement(x)
        except ShapeError as error:
            add_note(error, [_IN_PLACE])
            raise
        if layout.has_equal_blocks:
            del self._agreements[key], self._layouts[name, number]
            raise self._equal_blocks(name, layout)
        return layout

    def _agreement(self, name: str, kind: Kind | Sequence[int], is_dynamic: bool) -> ShapeAgreement:
        P_x, P_world = self.P_x, self.P_x.world
        return ShapeAgreement(
            f"input {name!r}",
            P_x,
            # The host does not wait for the GPU at every call.
            host_partition(P_world) if is_dynamic else P_world,
            P_x.dim,
            None if isinstance(kind, str) else tuple(kind),
            "dynamic" if is_dynamic else "static",
            digest=None if name in self.inputs else digest_unless_constant,
            remedy=f"pass distribute(..., inputs={{{name!r}: 'dynamic'}}) to agree at every call; "
            f"without gradients, ranks always do. {_IN_PLACE}",
        )

    def _equal_blocks(self, name: str, layout: BlockLayout) -> ShapeError:
        block, P_x = list(layout.shape_of(0)), self.P_x
        return ShapeError(
            f"input {name!r}: all {P_x.size} workers pass the same values, of shape {block}. They "
            f"have one dim for each axis of P_x of shape {list(P_x.shape)}, so they would be equal "
            f"blocks of a tensor of shape {list(layout.decomposition.shape)}; say what they are: "
            f"distribute(..., inputs={{{name!r}: 'whole'}}) if each is the whole tensor, 'split' "
            f"if each worker is to take its block of it, or 'block'. {_IN_PLACE}"
        )

    def notes_of(self, leaves: Sequence[tuple[str, Any]], error: Exception) -> list[str]:
        """Return what an error of a forward should say about the inputs.

        These are arrays, and the inputs that were taken as blocks by default, unless their dtypes
        explain the error.
        """
        notes = [
            f"input {name!r} is a {type(x).__module__}.{type(x).__name__}, which stays as it is; "
            "pass a tensor, such as torch.from_numpy(...)"
            for name, x in leaves
            if hasattr(x, "__array__") and not isinstance(x, torch.Tensor)
        ]
        by_default = {name for name, _ in self._layouts if name not in self.inputs}
        if is_about_dtypes(error):
            return notes
        blocks = [(n, x) for n, x in leaves if n in by_default and isinstance(x, GlobalTensor)]
        if blocks and self.P_x.size > 1:
            note = (
                f"inputs taken as blocks, with one dim for each axis of P_x of shape "
                f"{list(self.P_x.shape)}: "
                + ", ".join(f"{name!r} of global shape {list(x.shape)}" for name, x in blocks)
            )
            last = {blocks[-1][0]: "whole" if len(blocks) > 1 else "split"}
            notes.append(
                f"{note}; if every worker passes the whole tensor, use distribute(..., "
                f"inputs={last})"
            )
        return notes

    def warn_unsplit(self, tensors: Sequence[tuple[str, torch.Tensor]], scope: Scope) -> None:
        """Warn once, on the first rank, if no input is a block and ``inputs`` does not say so."""
        wholes = [(name, list(x.shape)) for name, x in tensors if name not in self.inputs]
        if self._has_warned or not wholes or self.P_x.size == 1:
            return
        self._has_warned = True
        if self.P_x.rank != 0:
            return
        name, shape = max(wholes, key=lambda row: len(row[1]))
        _, file, line = place_of_call(scope)
        warnings.warn_explicit(
            f"no input of the network is a block, so nothing is split and each of "
            f"{self.P_x.size} workers computes everything: {name!r} of shape {shape} has "
            f"{len(shape)} dims, but P_x of shape {list(self.P_x.shape)} has {self.P_x.dim} axes; "
            "add the missing dim, such as the batch, use a P_x with one axis for each dim, or pass "
            f"distribute(..., inputs={{{name!r}: 'whole'}})",
            UserWarning,
            file or "gpudist",
            line,
        )

    def _require_cut(self, name: str, layout: BlockLayout) -> None:
        """Raise for an ambiguous input: one cell on every worker along every split dim."""
        dims = [layout.decomposition.dims[axis] for axis in self.axes]
        if dims and all(blocks.lengths == (1,) * blocks.parts for blocks in dims):
            block = [1 if d in self.axes else n for d, n in enumerate(layout.decomposition.shape)]
            raise ShapeError(
                f"input {name!r} of shape {block} has one cell on every worker along the dims "
                f"that P_x of shape {list(self.P_x.shape)} splits, so it could be a block or the "
                f"whole tensor; say which: distribute(..., inputs={{{name!r}: 'block'}}) or "
                "'whole'"
            )


def _is_captured(x: torch.Tensor) -> bool:
    # Without CUDA torch has no function to ask.
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# For functions of methods, the names of the arguments after the first one.
_names: WeakKeyDictionary[FunctionType, Callable[[int], str]] = WeakKeyDictionary()


def names_by_place(function: Callable[..., Any]) -> Callable[[int], str]:
    """Return a function that maps the position of an argument to its name."""
    original = getattr(function, "__wrapped__", function)
    method = original.__func__ if type(original) is MethodType else None
    if type(method) is FunctionType and method in _names:
        return _names[method]
    names: list[str] = []
    rest = "args"
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = name
        elif (
            parameter.kind is not parameter.KEYWORD_ONLY
            and parameter.kind is not parameter.VAR_KEYWORD
        ):
            names.append(name)

    def name_of(i: int) -> str:
        return names[i] if i < len(names) else f"{rest}[{i - len(names)}]"

    if type(method) is FunctionType:
        _names[method] = name_of
    return name_of


def leaves_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Return the leaves of the arguments of a function, with the names of these arguments."""
    names = names_by_place(function)
    arguments = [*((names(i), x) for i, x in enumerate(args)), *kwargs.items()]
    return [(name, leaf) for name, argument in arguments for leaf in tree_leaves(argument)]


def add_note(error: Exception, notes: Sequence[str]) -> None:
    """Append notes, unless they are empty, to the text of an error of Python, torch or gpudist.

    ``Exception.add_note`` exists from Python 3.11 on, and is not part of ``str(error)``.
    """
    room = type(error).__module__.partition(".")[0]
    note = "; ".join(filter(None, notes))
    if (
        note
        and not isinstance(error, TransportError)
        and room in ("builtins", "torch", "gpudist")
        and len(error.args) == 1
        and str(error) == error.args[0]
    ):
        error.args = (f"{error.args[0].rstrip()} ({note})",)


def require_known(inputs: Inputs, names: Sequence[str], takes_any: bool) -> None:
    """Raise if a name is not an argument of the network's methods.

    Raises:
        ConversionError: a name or a value of ``inputs`` is not known.
    """
    unknown = [name for name in inputs if name not in names]
    if unknown and not takes_any:
        raise ConversionError(
            f"distribute: inputs names {unknown}, but the arguments of the network are "
            f"{list(names)}"
        )
    for name, kind in inputs.items():
        is_shape = not isinstance(kind, str) and all(hasattr(n, "__index__") for n in kind)
        if not is_shape and kind not in ("block", "whole", "dynamic", "split"):
            raise ConversionError(
                f"distribute: inputs[{name!r}] is {kind!r}; use 'block', 'whole', 'dynamic', "
                "'split' or the global shape of the tensor"
            )
