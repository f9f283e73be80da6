"""In converted networks, make large results of small plain tensors where their cells are needed.

A network that compares the positions of all tokens with each other, as for a mask, makes a plain
tensor of tokens squared. Every worker would have all of it. Instead, workers keep the small tensors
and the function, and each makes the cells that its blocks meet, without messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from gpudist.exchange.tracing import is_recorded
from gpudist.geometry.layout import Layout, split
from gpudist.sbp.global_spec import global_spec, make_wrapper, wrap
from gpudist.sbp.methods import METADATA
from gpudist.sbp.placement import Placement
from gpudist.sbp.signatures.elementwise import ELEMENTWISE
from gpudist.sbp.trees import has_any, map_tree, tensors_in

T = torch.Tensor
# Smaller results are made at once.
FEWEST_CELLS = 1 << 20
# Cells of the result for each cell of the inputs' memory.
_TIMES = 16
# Questions that need no cells.
_ANSWERS = {
    *METADATA,
    *(getattr(T, name).__get__ for name in ("requires_grad", "is_leaf", "grad", "grad_fn")),
}
# Views of the inputs give the view of the result.
_VIEWS = {
    T.unsqueeze, torch.unsqueeze, T.squeeze, torch.squeeze, T.expand, T.permute, torch.permute,
    T.transpose, torch.transpose, T.narrow, torch.narrow, T.select, torch.select, T.view, T.detach,
    T.broadcast_to, torch.broadcast_to, T.movedim, torch.movedim, T.__getitem__,
    T.mT.__get__,  # pyright: ignore[reportAttributeAccessIssue]
}  # fmt: skip
CASTS = {
    T.to, T.type_as, T.float, T.double, T.half, T.bfloat16, T.bool, T.int, T.long,
}  # fmt: skip
_IN_NAME = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__",
            "__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__imod__", "__ipow__",
            "__ilshift__", "__irshift__")  # fmt: skip


class OuterTensor(torch.Tensor):
    """A plain tensor whose cells are made when they are needed, from smaller ones.

    Every worker could make all of it, so functions treat it as replicated. An elementwise function
    of such tensors, and a view, is one again; any other function gets a tensor in blocks of rows.
    """

    _function: Any
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]
    _placement: Placement
    _kind: type[torch.Tensor]
    # What an in-place function has made of it.
    _tensor: torch.Tensor | None
    _view: tuple[OuterTensor, Any, Any, Any] | None

    @staticmethod
    def of(
        kind: type[torch.Tensor],
        placement: Placement,
        shape: tuple[int, ...],
        call: tuple[Any, tuple[Any, ...], dict[str, Any]],
        view: tuple[OuterTensor, Any, Any, Any] | None = None,
    ) -> OuterTensor:
        """Return the result of a call, whose tensors have the shape of the result or no dims.

        Args:
            kind: class of global tensors.
            placement: workers that hold the blocks, if blocks are needed.
            shape: shape of the result.
            call: function, positional arguments and keyword arguments.
            view: the tensor that it is a view of, and the function and arguments of the view.
        """
        first = _call_on_slices(call, (slice(0, 1),) * len(shape))
        x: Any = make_wrapper(OuterTensor, shape, dtype=first.dtype, device=first.device)
        x._function, x._args, x._kwargs = call
        x._kind, x._placement, x._tensor, x._view = kind, placement, None, view
        return x

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = without_cells(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
        args, kwargs = materialize_in(func, args, kwargs or {})
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(
            f"{func} reached a tensor whose cells are not made yet without passing through a "
            "Python function of torch; clone it first"
        )

    def cells(self, layout: Layout, index: tuple[int, ...] | None) -> torch.Tensor:
        """Make the block or copy of a layout at this rank's ``index``; empty without an index.

        Cost:
            The functions on the block's cells, at each call.
        """
        if index is None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return self._cells(layout.box(index).slices)

    def _cells(self, slices: tuple[slice, ...]) -> torch.Tensor:
        # As when the function was called, whatever surrounds this call.
        call = self._function, self._args, self._kwargs
        with torch.no_grad():
            if not torch._C._is_any_autocast_enabled():  # pyright: ignore
                return _call_on_slices(call, slices)
            with torch.autocast(self.device.type, enabled=False):
                return _call_on_slices(call, slices)

    def whole(self) -> torch.Tensor:
        """Make all cells."""
        return self._cells((slice(None),) * self.dim())

    @property
    def materialized(self) -> torch.Tensor | None:
        """Tensor that it stands for since it or its base was changed in place, else ``None``."""
        if self._tensor is None and self._view is not None:
            base, function, args, kwargs = self._view
            base_tensor = base.materialized
            if base_tensor is not None:
                # A change may have made it require grad.
                with torch.set_grad_enabled(base_tensor.requires_grad or torch.is_grad_enabled()):
                    self._tensor = function(base_tensor, *args, **kwargs)
        return self._tensor

    def materialize(self) -> torch.Tensor:
        """Make rows, unless a function that changed the tensor has made it before."""
        tensor = self.materialized
        return self.rows() if tensor is None else tensor

    def rows(self) -> torch.Tensor:
        """Make a tensor in blocks of the dim before the last one, as of queries, or all cells."""
        shape, placement = tuple(self.shape), self._placement
        dim = len(shape) - 2
        if dim < 0 or shape[dim] < placement.partition.size:
            return self.whole()
        rows = (split(dim),) * placement.axes
        local = self.cells(placement.layout(rows, shape), placement.index)
        return wrap(self._kind, local, global_spec(placement, rows, shape, self.dtype))

    def materialize_for_change(self) -> torch.Tensor:
        """Make the tensor for a function that changes it in place.

        From then on it stands for what was made, as do its base and all views of that, which are
        made when they are used: a rank may have freed a view that others still hold.
        """
        if self._view is not None:
            self._view[0].materialize_for_change()
        elif self._tensor is None:
            self._tensor = self.rows()
        tensor = self.materialized
        assert tensor is not None
        return tensor

    def make_view(self, function: Any, args: Sequence[Any], kwargs: Any) -> OuterTensor | None:
        """Return a view, or ``None`` if it would copy cells or has none."""
        with torch._C.DisableTorchFunction():
            result = function(torch.empty(self.shape, device="meta"), *args, **kwargs)
        if not result.dim() or not result.numel():
            return None

        def view(x: Any) -> Any:
            if isinstance(x, OuterTensor):
                return x.make_view(function, args, kwargs)
            return function(x, *args, **kwargs) if isinstance(x, torch.Tensor) and x.dim() else x

        try:
            call = (self._function, map_tree(self._args, view), map_tree(self._kwargs, view))
        except RuntimeError:
            # A view of dims that the inputs repeat.
            return None
        shape, own_view = tuple(result.shape), (self, function, args, kwargs)
        return OuterTensor.of(self._kind, self._placement, shape, call, own_view)

    def cast(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the tensor in another dtype, or ``self`` if it has that dtype."""
        dtypes = map_tree(args, lambda x: x.dtype if isinstance(x, torch.Tensor) else x)
        function = T.to if function is T.type_as else function
        result = outer(self._kind, self._placement, function, (self, *dtypes), kwargs)
        is_same = result is not None and (result.dtype, result.device) == (self.dtype, self.device)
        return self if is_same and not kwargs.get("copy") else result


def without_cells(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function of tensors whose cells are not made yet.

    Returns:
        ``NotImplemented`` if it needs cells.
    """
    if function in _ANSWERS:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    pending = [x for x in tensors_in([args, kwargs]) if isinstance(x, OuterTensor)]
    if any(x.materialized is not None for x in pending):
        return NotImplemented
    first, result = pending[0], None
    is_of_first = bool(args) and args[0] is first
    if function in ELEMENTWISE:
        result = outer(first._kind, first._placement, function, args, kwargs)
    elif is_of_first and function in CASTS:
        result = first.cast(function, args[1:], kwargs)
    elif is_of_first and function in _VIEWS and len(pending) == 1:
        is_basic = function is not T.__getitem__ or _is_basic(args[1])
        result = first.make_view(function, args[1:], kwargs) if is_basic else None
    return NotImplemented if result is None else result


def _is_basic(index: Any) -> bool:
    entries = index if isinstance(index, tuple) else (index,)
    return all(
        entry is None or entry is Ellipsis or isinstance(entry, slice) or type(entry) is int
        for entry in entries
    )


def _call_on_slices(call: tuple[Any, Any, Any], slices: tuple[slice, ...]) -> torch.Tensor:
    function, args, kwargs = call

    def part(x: Any) -> Any:
        if isinstance(x, OuterTensor):
            return x._cells(slices)
        return x[slices] if isinstance(x, torch.Tensor) and x.dim() else x

    return function(*map_tree(args, part), **map_tree(kwargs, part))


def changes_in_place(function: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a function of torch changes its first argument."""
    name = getattr(function, "__name__", "")
    is_named = name in _IN_NAME or (name.endswith("_") and not name.endswith("__"))
    return is_named or bool(kwargs.get("inplace")) or name == "__set__"


def materialize_in(
    function: Any, args: Any, kwargs: dict[str, Any], keeps_read: bool = False
) -> tuple[Any, Any]:
    """Return the arguments with blocks of rows in place of tensors that are not made yet.

    A tensor that ``function`` changes in place stands for its blocks from then on.

    Args:
        function, args, kwargs: call of a function of torch.
        keeps_read: whether tensors that ``function`` only reads remain as they are, if neither they
            nor their bases have been changed before.
    """
    if not has_any((*args, *kwargs.values()), OuterTensor):
        return args, kwargs
    is_first = changes_in_place(function, kwargs)

    def materialize(x: Any) -> Any:
        if not isinstance(x, OuterTensor):
            return x
        if is_first and x is args[0]:
            return x.materialize_for_change()
        return x if keeps_read and x.materialized is None else x.materialize()

    return map_tree(args, materialize), map_tree(kwargs, materialize)


def outer(
    kind: type[torch.Tensor], placement: Placement, function: Any, args: Any, kwargs: Any
) -> OuterTensor | None:
    """Return the result of an elementwise function of plain tensors, to be made in blocks.

    Args:
        kind: class of global tensors.
        placement: workers that hold the blocks.
        function: elementwise function.
        args, kwargs: its arguments; tensors are plain or results of this function.

    Returns:
        ``None`` if every worker is to compute the whole result: it is small, it is not much larger
        than its inputs, or an input requires grad.
    """
    tensors = tensors_in([args, kwargs])
    pending = [x for x in tensors if isinstance(x, OuterTensor)]
    if not pending and len(tensors) == 1 and 0 not in tensors[0].stride():
        return None
    if (
        "out" in kwargs
        or changes_in_place(function, kwargs)
        or any(x.materialized is not None for x in pending)
    ):
        return None
    plain = [x for x in tensors if not isinstance(x, OuterTensor)]
    if any(type(x) is not torch.Tensor or x.requires_grad for x in plain):
        return None
    shape = _broadcast_shape(tensors)
    cells = prod(shape)
    if cells < FEWEST_CELLS or cells < _TIMES * sum(map(_cells_in_memory, plain)):
        return None
    # Autocast leaves elementwise functions of other dtypes as they are.
    is_low = any(x.dtype in (torch.float16, torch.bfloat16) for x in tensors)
    if is_recorded() or (is_low and torch._C._is_any_autocast_enabled()):  # pyright: ignore
        return None

    def as_input(x: Any) -> Any:
        """Return the input in the result's shape, with memory of its own."""
        if not isinstance(x, torch.Tensor):
            return x
        if isinstance(x, OuterTensor):
            return x if tuple(x.shape) == shape else x.expand(shape)
        once = x[tuple(slice(None) if n else slice(1) for n in x.stride())].clone()
        return once.expand(shape) if x.dim() else once

    with torch.no_grad():
        call = (function, map_tree(args, as_input), map_tree(kwargs, as_input))
        first = _call_on_slices(call, (slice(0, 1),) * len(shape))
        if type(first) is not torch.Tensor or first.dim() != len(shape):
            return None
        return OuterTensor.of(kind, placement, shape, call)


def _broadcast_shape(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*(x.shape for x in tensors)))
    except RuntimeError:
        return ()  # The function itself says what does not fit.


def _cells_in_memory(x: torch.Tensor) -> int:
    strides = zip(x.shape, x.stride(), strict=True)
    return prod(n for n, stride in strides if stride)
