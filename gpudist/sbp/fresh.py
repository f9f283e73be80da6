"""In converted networks, make a new plain tensor global when a global tensor is written to it.

A network that collects results in ``y = torch.zeros(...)`` by ``y[index] = x`` would gather ``x``,
because a plain tensor has all cells. If no other function has been given ``y``, neither a view nor
the autograd graph can refer to its memory. Then ``y`` itself becomes a global tensor, split like
``x``, and blocks are written to blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch.utils import swap_tensors

from gpudist.exchange.tracing import is_recorded
from gpudist.geometry.layout import NdSbp, broadcast, split
from gpudist.sbp.global_tensor import GlobalTensor
from gpudist.sbp.outer import CASTS
from gpudist.sbp.signatures.factories import block
from gpudist.sbp.signatures.slicing import index_by_dim

T = torch.Tensor
FACTORIES = {
    torch.zeros, torch.ones, torch.empty, torch.full, torch.zeros_like, torch.ones_like,
    torch.empty_like, torch.full_like, T.new_zeros, T.new_ones, T.new_empty, T.new_full,
}  # fmt: skip


def _references(x: T) -> int:
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # pyright: ignore


# References to the memory of a tensor without aliases.
_ALONE = _references(torch.empty(1))


class FreshTensors:
    """Results of factories that no function of torch has been given, on every rank alike.

    A network forgets them at the end of its call.
    """

    def __init__(self) -> None:
        # By identity. A mark on the tensor itself would be saved with it.
        self.refs: dict[int, ref[T]] = {}

    def note(self, x: Any) -> None:
        """Note a result of a factory, or of a cast of one."""
        is_plain = type(x) is T and x.layout is torch.strided
        if (is_plain or (type(x) is GlobalTensor and x.is_copy_everywhere)) and not is_recorded():
            self.refs[id(x)] = ref(x)

    def has(self, x: Any) -> bool:
        reference = self.refs.get(id(x))
        return reference is not None and reference() is x

    def note_use(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Forget the arguments of a call; return whether its result is as new as the first one.

        If it writes a global tensor to a fresh one, that becomes global.
        """
        if function is T.__setitem__ and self.has(args[0]):
            y, index, value = args
            self._forget((index, value))
            if isinstance(value, GlobalTensor):
                self._forget((y,))
                _split_for(y, index, value)
            return False
        is_cast = function in CASTS and self.has(args[0])
        self._forget(args)
        if kwargs:
            self._forget(kwargs.values())
        return is_cast

    def _forget(self, tree: Iterable[Any]) -> None:
        for x in tree:
            if isinstance(x, (list, tuple)):
                self._forget(x)
            elif isinstance(x, dict):
                self._forget(x.values())
            else:
                self.refs.pop(id(x), None)


def _split_for(y: Any, index: Any, value: GlobalTensor) -> None:
    """Make ``y`` global, with blocks that fit ``y[index] = value``, if that is possible."""
    if y.device != value.device or not torch.can_cast(value.dtype, y.dtype):
        return
    if y.requires_grad or y.is_inference() != torch.is_inference_mode_enabled():
        return
    ranks = value.placement.partition.ranks
    if isinstance(y, GlobalTensor) and not {*ranks} <= {*y.placement.partition.ranks}:
        return
    sbp = _attributes(tuple(y.shape), index, value)
    if sbp is None or _references(getattr(y, "_local", y)) != _ALONE:
        return
    split_tensor: Any = block(value, getattr(y, "_local", y), sbp, tuple(y.shape))
    if isinstance(y, GlobalTensor):
        y._local, y._global_spec = split_tensor._local, split_tensor._global_spec
        return
    try:
        swap_tensors(y, split_tensor)
    except RuntimeError:
        return  # Something else refers to the tensor.


def _attributes(shape: tuple[int, ...], index: Any, value: GlobalTensor) -> NdSbp | None:
    """Return attributes of a tensor whose ``index`` receives ``value``; ``None`` for copies."""
    try:
        by_dim = index_by_dim(index, len(shape))
    except NotImplementedError:
        return None
    if sum(entry is not None for entry in by_dim) != len(shape):
        return None
    # Dims of ``y[index]``: the dim of ``y``, ``None`` for a new one, and the extent.
    cells: list[tuple[int | None, int]] = []
    dim = 0
    for entry in by_dim:
        if entry is None:
            cells.append((None, 1))
            continue
        if isinstance(entry, slice):
            cells.append((dim, len(range(*entry.indices(shape[dim])))))
        dim += 1
    # Torch aligns the last dims; further leading ones have one cell.
    cells = [*[(None, 1)] * (value.dim() - len(cells)), *cells][-value.dim() or len(cells) :]
    if any(n not in (1, extent) for n, (_, extent) in zip(value.shape, cells, strict=True)):
        return None

    def attribute_of_y(attribute: Any) -> Any:
        dim_of_y, extent = cells[attribute.dim] if attribute.is_split else (None, 0)
        if dim_of_y is None or value.shape[attribute.dim] != extent:
            return broadcast
        return split(dim_of_y, attribute.sizes) if extent == shape[dim_of_y] else split(dim_of_y)

    sbp = tuple(map(attribute_of_y, value.sbp))
    return sbp if any(attribute.is_split for attribute in sbp) else None
