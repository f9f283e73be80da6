"""The halo of a kernel of 3 cells with padding 1, in plain integers, for peers and checks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

Slices = tuple[slice, ...]


class Stencil:
    """One rank's halo of one cell around equal blocks of a tensor ``[B, C, *spatial]``.

    Attributes:
        block: the rank's cells of the global array.
        needed_shape: shape of the block with the cells around it.
        inner: the block inside the needed cells.
        neighbours: for each neighbour, its rank, the cells of the block it receives, and the place
            of its own cells among the needed ones.
        padding: the needed cells beyond the global edge.
    """

    def __init__(self, shape: Sequence[int], grid: Sequence[int], rank: int) -> None:
        self.shape, self.grid = tuple(shape), tuple(grid)
        self.extents = [n // p for n, p in zip(shape, grid, strict=True)]
        self.index = [int(i) for i in np.unravel_index(rank, self.grid)]
        self.width = [int(dim >= 2) for dim in range(len(shape))]
        places = list(zip(self.index, self.extents, self.width, strict=True))
        self.block = tuple(slice(i * n, (i + 1) * n) for i, n, _ in places)
        self.needed_shape = tuple(n + 2 * w for _, n, w in places)
        self.inner = tuple(slice(w, w + n) for _, n, w in places)
        self.neighbours = self._neighbours()
        self.padding = self._padding()

    def _neighbours(self) -> list[tuple[int, Slices, Slices]]:
        found: list[tuple[int, Slices, Slices]] = []
        for offsets in product(*[range(-w, w + 1) for w in self.width]):
            index = [i + o for i, o in zip(self.index, offsets, strict=True)]
            inside = all(0 <= i < p for i, p in zip(index, self.grid, strict=True))
            if inside and any(offsets):
                peer = int(np.ravel_multi_index(index, self.grid))
                dims = list(zip(offsets, self.extents, self.width, strict=True))
                sends = tuple(_edge(o, 0, n) for o, n, _ in dims)
                receives = tuple(_beyond(o, w, w + n) for o, n, w in dims)
                found.append((peer, sends, receives))
        return found

    def _padding(self) -> list[Slices]:
        everything = (slice(None),) * len(self.shape)
        slabs: list[Slices] = []
        for dim, (i, p, n) in enumerate(zip(self.index, self.grid, self.extents, strict=True)):
            if self.width[dim] and i == 0:
                slabs.append((*everything[:dim], slice(0, 1), *everything[dim + 1 :]))
            if self.width[dim] and i == p - 1:
                slabs.append((*everything[:dim], slice(n + 1, n + 2), *everything[dim + 1 :]))
        return slabs

    def needed(self, whole: np.ndarray) -> np.ndarray:
        """Return the cells this rank's kernel reads, zero beyond the edge of ``whole``."""
        padded = np.pad(whole, [(w, w) for w in self.width])
        ranges = zip(self.block, self.width, strict=True)
        return padded[tuple(slice(b.start, b.stop + 2 * w) for b, w in ranges)].copy()


def _edge(offset: int, start: int, stop: int) -> slice:
    return {-1: slice(start, start + 1), 0: slice(start, stop), 1: slice(stop - 1, stop)}[offset]


def _beyond(offset: int, start: int, stop: int) -> slice:
    return {-1: slice(start - 1, start), 0: slice(start, stop), 1: slice(stop, stop + 1)}[offset]
