"""Layout of a global tensor: which cells each rank holds, in integers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from math import prod

from gpudist.geometry.boxes import Box
from gpudist.geometry.cartesian import index_of
from gpudist.sbp.attributes import NdSbp

Index = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor of global ``shape`` on a grid of ranks, one attribute per axis.

    Attributes:
        ranks: ranks of the world, row-major on the grid.
        grid: shape of the grid.
        sbp: attribute along each axis of the grid.
        shape: global shape.
    """

    ranks: tuple[int, ...]
    grid: tuple[int, ...]
    sbp: NdSbp
    shape: tuple[int, ...]

    def box(self, index: Index) -> Box:
        """Return the global cells of the rank at ``index``; the outer axis splits first."""
        start, stop = [0] * len(self.shape), list(self.shape)
        for one, parts, i in zip(self.sbp, self.grid, index, strict=True):
            if one.is_split:
                d = one.dim
                low, high = one.cells(stop[d] - start[d], parts, i)
                start[d], stop[d] = start[d] + low, start[d] + high
        return Box(tuple(start), tuple(stop))

    @cached_property
    def boxes(self) -> dict[int, Box]:
        """Cells of each rank."""
        return {rank: self.box(index_of(i, self.grid)) for i, rank in enumerate(self.ranks)}

    def groups(self, inner: str) -> dict[Box, list[list[int]]]:
        """Return, for each block with cells, the groups of ranks that hold it.

        Args:
            inner: kind of the axes along which the ranks of a group differ: ``"broadcast"`` for all
                copies of each term, ``"partial_sum"`` for all terms of each copy.
        """
        found: defaultdict[Box, defaultdict[Index, list[int]]]
        found = defaultdict(lambda: defaultdict(list))
        for position, rank in enumerate(self.ranks):
            index = index_of(position, self.grid)
            outer = tuple(
                -1 if one.kind == inner else i for one, i in zip(self.sbp, index, strict=True)
            )
            if self.boxes[rank].volume:
                found[self.boxes[rank]][outer].append(rank)
        return {box: list(groups.values()) for box, groups in found.items()}

    def count(self, kind: str) -> int:
        """Return the number of terms or copies of each cell."""
        return prod(n for one, n in zip(self.sbp, self.grid, strict=True) if one.kind == kind)

    def same_workers(self, other: Layout) -> bool:
        """Return whether both layouts use the same ranks on the same grid."""
        return self.ranks == other.ranks and self.grid == other.grid


def share_at_cuts(sbp: NdSbp, shape: tuple[int, ...], grid: tuple[int, ...]) -> float:
    """Return the share of a block's cells in one layer at each cut: what neighbours would read."""
    parts: defaultdict[int, int] = defaultdict(lambda: 1)
    for one, n in zip(sbp, grid, strict=True):
        if one.is_split:
            parts[one.dim] *= n
    return sum(n / max(shape[dim], 1) for dim, n in parts.items() if n > 1)
