"""Tensors that a function takes together, of which one may have a single cell in a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.convert.spread import spread, spread_along
from gpudist.errors import ShapeError
from gpudist.nn import Broadcast
from gpudist.ops.agreement import Agreement, Layout
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
        broadcasts = self._bound(tensors[0], self._bind, *extents)
        return [
            x if broadcast is None else spread(broadcast, x)
            for broadcast, x in zip(broadcasts, tensors, strict=True)
        ]

    def _bind(self, x: torch.Tensor, *extents: int) -> tuple[Broadcast | None, ...]:
        dims = self.P.dim
        others = [extents[first : first + dims] for first in range(0, len(extents), dims)]
        shapes = [tuple(x.shape), *others]
        layouts = [
            agreement(x.new_empty(()).expand(shape))
            for agreement, shape in zip(self._agreements, shapes, strict=True)
        ]
        return self._broadcasts_of(layouts)

    def _broadcasts_of(self, layouts: Sequence[Layout]) -> tuple[Broadcast | None, ...]:
        """What each tensor needs, from how all of them are cut."""
        cuts = [layout.decomposition.dims for layout in layouts]
        single: list[list[int]] = [[] for _ in cuts]
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
                single[which].append(dim)
        return tuple(
            spread_along(dims, self.P, layout) if dims else None
            for dims, layout in zip(single, layouts, strict=True)
        )

    def extra_repr(self) -> str:
        return f"P={list(self.P.shape)}"


def _lengths(blocks: Any) -> list[int]:
    return [blocks.length(i) for i in range(blocks.parts)]
