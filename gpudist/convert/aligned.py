"""Tensors that a function takes together, of which one may have a single cell in a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.errors import ShapeError
from gpudist.nn import Broadcast
from gpudist.nn.partitions import plane
from gpudist.ops.agreement import Agreement
from gpudist.ops.bound import Bound
from gpudist.partition import CartesianPartition


class Aligned(torch.nn.Module):
    """Blocks of several tensors on ``P`` that fit each other as the tensors do.

    Torch combines a tensor of one cell in a dim with any other one. Cut into blocks, it has that
    cell on one worker of the axis alone: it is copied to the others.

    Args:
        P: owns all of them.
        count: of the tensors.
        joined: they are put beside each other, and not combined cell by cell: all of one size.

    Cost:
        Messages at the first call alone, to agree on the blocks; and for a tensor of one cell a
        broadcast, backward a sum-reduce.

    Raises:
        ShapeError: on every rank alike, if the tensors do not fit each other.
    """

    def __init__(self, P: CartesianPartition, count: int, joined: bool) -> None:
        super().__init__()
        self.P, self._joined = P, joined
        self._agreements = [Agreement("Aligned", P, P, P.dim) for _ in range(count)]
        self._bound = Bound[tuple[Broadcast | None, ...]]("static")

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if not self.P.active:
            return list(tensors)
        extents = [n for x in tensors[1:] for n in x.shape]
        spreads = self._bound(tensors[0], self._bind, *extents)
        return [
            x if spread is None else _spread(spread, x)
            for spread, x in zip(spreads, tensors, strict=True)
        ]

    def _bind(self, x: torch.Tensor, *extents: int) -> tuple[Broadcast | None, ...]:
        dims = self.P.dim
        others = [extents[first : first + dims] for first in range(0, len(extents), dims)]
        shapes = [tuple(x.shape), *others]
        layouts = [
            agreement(x.new_empty(()).expand(shape))
            for agreement, shape in zip(self._agreements, shapes, strict=True)
        ]
        return self._spreads_of([layout.decomposition.dims for layout in layouts])

    def _spreads_of(self, cuts: Sequence[Any]) -> tuple[Broadcast | None, ...]:
        """What each tensor needs, from how all of them are cut."""
        spread_along: list[list[int]] = [[] for _ in cuts]
        for dim, parts in enumerate(self.P.shape):
            blocks = [cut[dim] for cut in cuts]
            largest = max(blocks, key=lambda one: one.extent)
            for which, own in enumerate(blocks):
                if parts == 1 or own == largest:
                    continue
                if own.extent != 1 or own.length(0) != 1 or self._joined:
                    raise ShapeError(
                        f"dim {dim}: a tensor of {own.extent} cells in blocks "
                        f"{_lengths(own)} is combined with one of {largest.extent} cells in "
                        f"blocks {_lengths(largest)}"
                    )
                spread_along[which].append(dim)
        return tuple(self._spread_along(dims) for dims in spread_along)

    def _spread_along(self, dims: Sequence[int]) -> Broadcast | None:
        if not dims:
            return None
        others = [axis for axis in range(self.P.dim) if axis not in dims]
        return Broadcast(plane(self.P, others), self.P)

    def extra_repr(self) -> str:
        return f"P={list(self.P.shape)}"


def _spread(spread: Broadcast, x: torch.Tensor) -> torch.Tensor:
    # An empty block becomes the placeholder for none.
    return spread(x if spread.P_x.active or x.dim() < 2 else x.flatten(1))


def _lengths(blocks: Any) -> list[int]:
    return [blocks.length(i) for i in range(blocks.parts)]
