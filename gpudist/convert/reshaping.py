"""Views that join and cut up whole dims, and attention written with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

from gpudist import nn
from gpudist.convert.values import Count, Extent, Extents, split_dims
from gpudist.errors import ConversionError, ShapeError
from gpudist.ops.agreement import refuse
from gpudist.partition import CartesianPartition

P = CartesianPartition
Pairs = Sequence[tuple[int, int]]


class ReshapedBlocks(torch.nn.Module):
    """A reshape of blocks that keeps the dims which ``P_x`` splits; a view, no communication.

    Args:
        P_x: owns the input.
        kept: each dim that is split, and where it is in the output.

    Raises:
        ShapeError: the sizes of a call do not keep those dims.
    """

    def __init__(self, P_x: CartesianPartition, kept: Pairs) -> None:
        super().__init__()
        self.P_x, self.kept = P_x, tuple(kept)

    def forward(self, x: torch.Tensor, *sizes: Any) -> torch.Tensor:
        if not self.P_x.active:
            return x
        if len(sizes) == 1 and not isinstance(sizes[0], int):
            sizes = tuple(sizes[0])
        shape = list(sizes)
        bounds = [(-1, -1), *self.kept, (x.dim(), len(shape))]
        for source, place in self.kept:
            shape[place] = x.shape[source] if shape[place] == -1 else shape[place]
        for (before, first), (after, last) in pairwise(bounds):
            inside = range(first + 1, last)
            _fill_in(shape, inside, prod(x.shape[before + 1 : after]))
            keeps = prod(shape[i] for i in inside) == prod(x.shape[before + 1 : after])
            if after < x.dim():
                keeps = keeps and shape[last] == x.shape[after]
            if not keeps:
                text = f"reshape of a block {list(x.shape)} to {list(sizes)} does not keep dim"
                refuse(self.P_x, ShapeError(f"{text} {after}, behind {before}"))
        return x.reshape(shape)

    def extra_repr(self) -> str:
        return f"P_x={list(self.P_x.shape)}, kept={self.kept}"


def _fill_in(shape: list[int], dims: range, cells: int) -> None:
    """Put a number in place of -1 among ``dims``, which hold so many cells."""
    for dim in dims:
        if shape[dim] == -1:
            others = prod(shape[i] for i in dims if i != dim)
            shape[dim] = cells // others if others else 0


class Pieces(list[Any]):
    """A tensor cut up along a whole dim into any number of tensors on one partition."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


def reshaped_blocks(call: Any, x: P, sizes: Sequence[Any]) -> P:
    """``view`` and ``reshape`` that keep the dims which are split.

    These are known by the extents they are given as, or by a -1 where one is left.
    """
    known = (int, Extent, Count)
    if not sizes or not all(isinstance(size, known) for size in sizes):
        raise ConversionError(f"a reshape to {list(sizes)} is not known to be right on blocks")
    split = split_dims(x)
    places = [i for i, size in enumerate(sizes) if isinstance(size, Extent) and _is_split(size)]
    if len(places) == len(split) - 1:
        places = sorted((*places, *(i for i, size in enumerate(sizes) if size == -1)))
    kept = list(zip(split, places, strict=False))
    parts = [_parts_of(sizes[place]) or x.shape[dim] for dim, place in kept]
    keeps = len(places) == len(split) and parts == [x.shape[dim] for dim in split]
    bounds = [(-1, -1), *kept, (x.dim, len(sizes))]
    # Dims beside those that are kept cannot come of none, nor be lost.
    keeps = keeps and all(
        (after - before == 1) == (last - first == 1)
        for (before, first), (after, last) in pairwise(bounds)
    )
    if not keeps:
        raise ConversionError(
            "only a reshape to (batch, -1), or one that keeps the dims which are split, "
            f"{split}, is known to be right on blocks; give these as sizes read off the shape"
        )
    shape = [1] * len(sizes)
    for dim, place in kept:
        shape[place] = x.shape[dim]
    given = call.arguments[1:]
    output = x.create_cartesian_topology_partition(shape)
    return call.instead(ReshapedBlocks(x, kept), output, call.node, *given)


def _is_split(size: Extent) -> bool:
    return size.P.shape[size.dim] > 1


def _parts_of(size: Any) -> int | None:
    return size.P.shape[size.dim] if isinstance(size, Extent) else None


def unflattened(call: Any, x: P, dim: int, sizes: Sequence[Any]) -> P:
    """``unflatten`` of a whole dim."""
    dim %= x.dim
    _require_whole(x, dim, "unflattened")
    shape = (*x.shape[:dim], *(1,) * len(sizes), *x.shape[dim + 1 :])
    return x.create_cartesian_topology_partition(shape)


def unsqueezed(call: Any, x: P, dim: int) -> P:
    """``unsqueeze``."""
    dim %= x.dim + 1
    return x.create_cartesian_topology_partition((*x.shape[:dim], 1, *x.shape[dim:]))


def cut_up(call: Any, x: P, split_size: Any, dim: int = 0) -> Pieces:
    """``split`` along a whole dim."""
    _require_whole(x, dim, "cut up")
    return Pieces([x])


def unbound(call: Any, x: P, dim: int = 0) -> Pieces:
    """``unbind`` of a whole dim."""
    dim %= x.dim
    _require_whole(x, dim, "cut up")
    return Pieces([x.create_cartesian_topology_partition((*x.shape[:dim], *x.shape[dim + 1 :]))])


def _require_whole(x: P, dim: int, verb: str) -> None:
    if x.shape[dim] > 1:
        raise ConversionError(f"dim {dim % x.dim} of {list(x.shape)} is {verb}, which is split")


def attended(
    call: Any,
    query: P,
    key: P,
    value: P,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> P:
    """Torch's ``scaled_dot_product_attention``, of heads ``[B, H, S, D]``."""
    if any(x != query for x in (key, value)):
        raise ConversionError("query, key and value are tensors on different partitions")
    if attn_mask is not None:
        raise ConversionError("of masks only the causal one is supported; pass is_causal=True")
    if call.follows_mode and not call.training:
        raise ConversionError("dropout_p is 0 in evaluation; convert the network in training mode")
    if dropout_p and not call.follows_mode:
        raise ConversionError(f"dropout_p={dropout_p} in training and evaluation")
    layer = nn.RingAttention(query, is_causal, scale, dropout_p)
    return call.instead(layer, query, *call.arguments[:3])


def joined_sizes(arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """``x.shape[:-1] + (a, b)``; ``None`` if the arguments are something else."""
    if not any(isinstance(part, Extents) for part in arguments):
        return None
    joined: list[Any] = []
    for part in arguments:
        if isinstance(part, Extents):
            joined += [Extent(part.P, part.node, dim) for dim in part.dims]
        elif isinstance(part, tuple):
            joined += part
        else:
            return None
    return tuple(joined)


FUNCTIONS: dict[Any, Any] = {
    torch.nn.functional.scaled_dot_product_attention: attended,
    torch.split: cut_up,
    torch.unbind: unbound,
    torch.unflatten: unflattened,
    torch.unsqueeze: unsqueezed,
}
METHODS: dict[str, Any] = {
    "split": cut_up,
    "unbind": unbound,
    "unflatten": unflattened,
    "unsqueeze": unsqueezed,
}
