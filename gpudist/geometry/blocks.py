"""Cut a global tensor into blocks, one per worker.

:class:`Blocks` cuts one dim; :class:`Decomposition` cuts a tensor, as the product of the cuts of
its dims. Queries are for one worker, and take a time that does not grow with the number of workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from gpudist.errors import ShapeError
from gpudist.geometry.boxes import Box


def balanced_block(extent: int, parts: int, index: int) -> tuple[int, int]:
    """Return the half-open range of block ``index`` of ``parts`` balanced blocks.

    The first ``extent % parts`` blocks have one cell more; blocks may be empty.
    """
    size, larger = divmod(extent, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


@dataclass(frozen=True)
class Blocks:
    """Decomposition of one dim of ``extent`` cells into ``parts`` consecutive blocks.

    Attributes:
        extent: global number of cells.
        parts: number of workers along the axis.
        sizes: cells of each block, or ``None`` for balanced blocks.
    """

    extent: int
    parts: int
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.extent < 0 or self.parts < 1:
            raise ShapeError(
                f"{self.extent} cells cannot be cut into {self.parts} blocks; "
                f"the extent must be at least 0 and the number of blocks at least 1"
            )
        if self.sizes is None:
            return
        if len(self.sizes) != self.parts or sum(self.sizes) != self.extent or min(self.sizes) < 0:
            raise ShapeError(
                f"block sizes {self.sizes} do not cut {self.extent} cells into {self.parts} blocks"
            )

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Blocks:
        """Return blocks of the given sizes; balanced sizes give balanced blocks."""
        balanced = cls(sum(sizes), len(sizes))
        if all(balanced.length(index) == size for index, size in enumerate(sizes)):
            return balanced
        return cls(balanced.extent, balanced.parts, tuple(sizes))

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes or ()))

    def block(self, index: int) -> tuple[int, int]:
        """Return the half-open range of global cells in block ``index``."""
        if self.sizes is None:
            return balanced_block(self.extent, self.parts, index)
        stop = self._stops[index]
        return stop - self.sizes[index], stop

    def length(self, index: int) -> int:
        start, stop = self.block(index)
        return stop - start

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of cells of each block."""
        return tuple([self.length(index) for index in range(self.parts)])

    @property
    def occupied(self) -> int:
        """Index from which on all blocks are empty."""
        return min(self.parts, self.extent) if self.sizes is None else self.parts

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(index, start, stop)`` of the overlap for each block in ``[start, stop)``."""
        start, stop = max(start, 0), min(stop, self.extent)
        if start >= stop:
            return
        for index in range(self._owner(start), self._owner(stop - 1) + 1):
            block_start, block_stop = self.block(index)
            if block_start < block_stop:
                yield index, max(start, block_start), min(stop, block_stop)

    def _owner(self, cell: int) -> int:
        if self.sizes is not None:
            return bisect_right(self._stops, cell)
        size, larger = divmod(self.extent, self.parts)
        in_larger = larger * (size + 1)
        if cell < in_larger:
            return cell // (size + 1)
        return larger + (cell - in_larger) // size


@dataclass(frozen=True)
class Decomposition:
    """Decomposition of a global tensor over a Cartesian grid: one :class:`Blocks` per dim."""

    dims: tuple[Blocks, ...]

    @classmethod
    def balanced(cls, shape: Sequence[int], grid: Sequence[int]) -> Decomposition:
        """Balanced blocks of a tensor of global ``shape`` over ``grid``, one axis per dim."""
        if len(shape) != len(grid):
            raise ShapeError(
                f"a tensor with {len(shape)} dims does not fit a partition with {len(grid)} axes; "
                f"give the partition one axis per dim of the tensor"
            )
        return cls(tuple(Blocks(n, p) for n, p in zip(shape, grid, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(blocks.extent for blocks in self.dims)

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the process grid."""
        return tuple(blocks.parts for blocks in self.dims)

    def block(self, index: Sequence[int]) -> Box:
        """Return the global box that the worker at ``index`` owns."""
        ranges = [blocks.block(i) for blocks, i in zip(self.dims, index, strict=True)]
        return Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))

    def with_extents(self, extents: dict[int, int]) -> Decomposition:
        """Return the decomposition with other extents in dims that are not partitioned."""
        if not extents:
            return self
        partitioned = [d for d in extents if self.dims[d].parts > 1]
        if partitioned:
            raise ShapeError(
                f"the extents of dims {partitioned} cannot change: these dims are partitioned, and "
                f"the ranks must first agree on how the new extents are cut"
            )
        return Decomposition(
            tuple(Blocks(extents[d], 1) if d in extents else b for d, b in enumerate(self.dims))
        )
