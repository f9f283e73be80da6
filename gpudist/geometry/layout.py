"""Layout of a tensor on a grid of ranks: an attribute for each axis, and the cells of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Literal, get_args

from gpudist.checks.arguments import check
from gpudist.errors import PartitionError
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.boxes import Box
from gpudist.geometry.cartesian import index_of, rank_of

Kind = Literal["split", "broadcast", "partial_sum"]
_KINDS = get_args(Kind)


@dataclass(frozen=True)
class Sbp:
    """Attribute of a tensor along one axis of a placement.

    Attributes:
        kind: ``"split"`` for blocks of one dim, ``"broadcast"`` for a copy on every worker, or
            ``"partial_sum"`` for terms whose sum is the tensor.
        dim: split dim, ``-1`` for the other two kinds.
        sizes: cells of each block; ``None`` for balanced blocks, even if given as explicit sizes.
    """

    kind: Kind
    dim: int = -1
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # Skip the detailed checks for the common case: operators on global tensors create many
        # attributes.
        if type(self.dim) is not int or type(self.kind) is not str or self.sizes is not None:
            check(Sbp.__init__, "Sbp", (None, self.kind, self.dim, self.sizes), {})
        if self.kind not in _KINDS:
            raise PartitionError(f"Sbp: kind is {self.kind!r}; expected one of {_KINDS}")
        if self.sizes is None:
            return
        if self.kind != "split" or not self.sizes or min(self.sizes) < 0:
            raise PartitionError(
                f"{self!r}: only a split takes sizes, and needs at least one, each 0 or more"
            )
        # Attributes that cut at the same cells compare equal.
        object.__setattr__(self, "sizes", Blocks.of_sizes(self.sizes).sizes)

    def __call__(self) -> Sbp:
        """Return ``self``, so that ``broadcast()`` is equivalent to ``broadcast``."""
        return self

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={list(self.sizes)}"
        return f"split({self.dim}{sizes})" if self.kind == "split" else f"{self.kind}{sizes}"

    @property
    def is_split(self) -> bool:
        return self.kind == "split"

    @lru_cache(maxsize=1024)  # noqa: B019
    def blocks(self, extent: int, parts: int) -> Blocks:
        """Return the blocks of a split dim of ``extent`` cells over ``parts`` workers."""
        return Blocks(extent, parts, self.sizes)

    @property
    def dual(self) -> Sbp:
        """Attribute of the gradient: ``partial_sum`` for ``broadcast``, and the reverse."""
        return _DUAL.get(self, self)


def split(dim: int, sizes: Sequence[int] | None = None) -> Sbp:
    """Return the attribute for blocks of dim ``dim``.

    Args:
        dim: split dim, counted from the front.
        sizes: cells of each block, one for each worker along the axis; 0 for an empty block. They
            add up to the extent of the dim, or of each outer block if an outer axis also splits the
            dim. By default, blocks are balanced, ``n // p`` cells and one more in the first
            ``n % p``; an attribute with these sizes equals the one without. Operators that need
            other blocks box the tensor first. If the sizes do not fit a tensor, every rank raises
            ``ShapeError`` when they are applied to it.

    Returns:
        Attribute for one axis of a placement.

    Raises:
        PartitionError: ``dim`` or a size is negative, or ``sizes`` is empty.
    """
    if type(dim) is not int or sizes is not None:
        check(split, "split", (dim, sizes), {})
    if dim < 0:
        raise PartitionError(
            f"split({dim}): dim is negative; count it from the front, starting at 0"
        )
    if sizes is None and dim < len(_BALANCED):
        return _BALANCED[dim]
    return Sbp("split", int(dim), None if sizes is None else tuple(int(size) for size in sizes))


# Attributes of the first dims: operators ask for them many times.
_BALANCED = tuple(Sbp("split", dim) for dim in range(8))


def misfit(sbp: NdSbp, grid: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return why explicit sizes do not fit this grid and shape; ``""`` if they fit."""
    if all(attribute.sizes is None for attribute in sbp):
        return ""
    # Cells of the blocks of each dim, after the outer axes have split it.
    blocks = [{extent} for extent in shape]
    for axis, (attribute, parts) in enumerate(zip(sbp, grid, strict=True)):
        if not attribute.is_split:
            continue
        cut = blocks[attribute.dim]
        if attribute.sizes is not None and (
            len(attribute.sizes) != parts or cut != {sum(attribute.sizes)}
        ):
            cells = " or ".join(str(extent) for extent in sorted(cut))
            return (
                f"{attribute!r}: {len(attribute.sizes)} sizes add up to {sum(attribute.sizes)} "
                f"cells, but axis {axis} has {parts} workers and splits {cells} cells of dim "
                f"{attribute.dim}; give one size per worker, {cells} cells in total, or omit sizes"
            )
        cuts = [attribute.blocks(extent, parts) for extent in cut]
        blocks[attribute.dim] = {each.length(i) for each in cuts for i in range(parts)}
    return ""


broadcast = Sbp("broadcast")
"""Attribute of a tensor of which every worker along the axis holds a full copy."""
partial_sum = Sbp("partial_sum")
"""Attribute of a tensor that is the sum of the parts of all workers along the axis."""
_DUAL = {broadcast: partial_sum, partial_sum: broadcast}

NdSbp = tuple[Sbp, ...]


def nd_sbp(sbp: Sbp | Sequence[Sbp], axes: int, dims: int | None = None) -> NdSbp:
    """Return ``sbp`` as a tuple with one attribute per axis.

    Args:
        sbp: attributes, outer axis first, or a single attribute for the only axis, or for all axes
            unless it is a split.
        axes: number of axes of the placement.
        dims: number of dims of the tensor, if known.

    Raises:
        PartitionError: the number of attributes differs from the number of axes, or a dim does not
            exist.
    """
    if isinstance(sbp, Sbp):
        sbp = (sbp,) if sbp.is_split else (sbp,) * axes
    attributes = tuple(sbp)
    if len(attributes) != axes or not all(isinstance(attribute, Sbp) for attribute in attributes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PartitionError(
            f"sbp={sbp!r}: give one of split(dim), broadcast and partial_sum for each of the "
            f"{axes} axes of the placement"
        )
    for attribute in attributes:
        if dims is not None and attribute.dim >= dims:
            raise PartitionError(
                f"{attribute!r}: the tensor has {dims} dims, numbered from 0; give one of them"
            )
    return attributes


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
        for attribute, parts, i in zip(self.sbp, self.grid, index, strict=True):
            if attribute.is_split:
                d = attribute.dim
                low, high = attribute.blocks(stop[d] - start[d], parts).block(i)
                start[d], stop[d] = start[d] + low, start[d] + high
        return Box(tuple(start), tuple(stop))

    def index(self, rank: int) -> Index | None:
        """Return the index of ``rank`` on the grid, ``None`` if it is not there."""
        return index_of(self.ranks.index(rank), self.grid) if rank in self.ranks else None

    def overlapping(
        self, box: Box, pinned: Mapping[int, int]
    ) -> Iterator[tuple[dict[int, int], Box]]:
        """Yield each block with cells of ``box``: its index along split axes, and the common cells.

        Args:
            box: global cells, at least one.
            pinned: index along some axes, where other blocks are left out.
        """
        of_dims: list[Iterator[tuple[dict[int, int], int, int]]] = []
        for dim, extent in enumerate(self.shape):
            axes = [axis for axis, attribute in enumerate(self.sbp) if attribute.dim == dim]
            of_dims.append(self._segments(axes, extent, box.start[dim], box.stop[dim], pinned))
        for segments in product(*of_dims):
            at = {axis: i for indices, _, _ in segments for axis, i in indices.items()}
            yield (
                at,
                Box(tuple(low for _, low, _ in segments), tuple(high for *_, high in segments)),
            )

    def _segments(
        self, axes: Sequence[int], extent: int, low: int, high: int, pinned: Mapping[int, int]
    ) -> Iterator[tuple[dict[int, int], int, int]]:
        """Yield the index of each block of ``extent`` cells in the given range, and its part of it.

        Args:
            axes: axes that split these cells, outer axis first.
            extent: number of cells.
            low, high: range of cells.
            pinned: index along some axes.
        """
        if not axes:
            yield {}, low, high
            return
        axis, *inner = axes
        blocks = self.sbp[axis].blocks(extent, self.grid[axis])
        if axis in pinned:
            start, stop = blocks.block(pinned[axis])
            low, high = max(low, start), min(high, stop)
        for i, first, last in blocks.overlapping(low, high):
            start, stop = blocks.block(i)
            inner_segments = self._segments(
                inner, stop - start, first - start, last - start, pinned
            )
            for indices, a, b in inner_segments:
                yield {axis: i, **indices}, start + a, start + b

    @cached_property
    def boxes(self) -> dict[int, Box]:
        """Cells of each rank."""
        return {rank: self.box(index_of(i, self.grid)) for i, rank in enumerate(self.ranks)}

    @cached_property
    def has_empty_blocks(self) -> bool:
        """Whether a rank has no cells; found from the lengths of blocks along each dim."""
        for dim, extent in enumerate(self.shape):
            lengths = {extent}
            for attribute, parts in zip(self.sbp, self.grid, strict=True):
                if attribute.dim == dim:
                    cuts = [attribute.blocks(length, parts) for length in lengths]
                    # The longest and the shortest of balanced blocks are the first and the last.
                    of = (0, parts - 1) if attribute.sizes is None else range(parts)
                    lengths = {blocks.length(i) for blocks in cuts for i in of}
            if 0 in lengths:
                return True
        return False

    @cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        """Blocks of each dim, none of which several axes split.

        Raises:
            ValueError: several axes split a dim, which then has no blocks for each index.
        """
        per_dim: list[Blocks] = []
        for dim, extent in enumerate(self.shape):
            axes = zip(self.sbp, self.grid, strict=True)
            cut = [
                attribute.blocks(extent, parts)
                for attribute, parts in axes
                if attribute.dim == dim and parts > 1
            ]
            (blocks,) = cut or [Blocks(extent, 1)]
            per_dim.append(blocks)
        return tuple(per_dim)

    def groups(self, inner: str) -> dict[Box, list[list[int]]]:
        """Return, for each block with cells, the groups of ranks that hold it.

        Args:
            inner: kind of the axes along which the ranks of a group differ: ``"broadcast"`` for all
                copies of each term, ``"partial_sum"`` for all terms of each copy.
        """
        ranks_by_box: defaultdict[Box, defaultdict[Index, list[int]]]
        ranks_by_box = defaultdict(lambda: defaultdict(list))
        for position, rank in enumerate(self.ranks):
            index = index_of(position, self.grid)
            outer = tuple(
                -1 if attribute.kind == inner else i
                for attribute, i in zip(self.sbp, index, strict=True)
            )
            if self.boxes[rank].volume:
                ranks_by_box[self.boxes[rank]][outer].append(rank)
        return {box: list(groups.values()) for box, groups in ranks_by_box.items()}

    def count(self, kind: str) -> int:
        """Return the number of terms or copies of each cell."""
        return prod(
            n for attribute, n in zip(self.sbp, self.grid, strict=True) if attribute.kind == kind
        )

    def same_workers(self, other: Layout) -> bool:
        """Return whether both layouts use the same ranks on the same grid."""
        return self.ranks == other.ranks and self.grid == other.grid

    def with_sbp(self, sbp: NdSbp) -> Layout:
        """Return the layout with other attributes."""
        return Layout(self.ranks, self.grid, sbp, self.shape)

    def restrict(self, axes: Sequence[int], dims: Sequence[int]) -> Layout:
        """Return the layout on these axes, of these dims; no other axis splits them."""
        sbp = tuple(
            split(dims.index(attribute.dim), attribute.sizes)
            if attribute.dim in dims
            else broadcast
            for attribute in (self.sbp[axis] for axis in axes)
        )
        return Layout(
            (), tuple(self.grid[a] for a in axes), sbp, tuple(self.shape[d] for d in dims)
        )

    @cached_property
    def dual(self) -> Layout:
        """Layout of the gradient of a tensor with this layout."""
        return self.with_sbp(tuple(attribute.dual for attribute in self.sbp))

    @property
    def first_copies(self) -> Layout:
        """This layout on the first rank along every axis of copies."""
        kept = [
            range(1 if attribute == broadcast else n)
            for attribute, n in zip(self.sbp, self.grid, strict=True)
        ]
        ranks = tuple(self.ranks[rank_of(index, self.grid)] for index in product(*kept))
        return Layout(ranks, tuple(map(len, kept)), self.sbp, self.shape)


def share_at_cuts(sbp: NdSbp, shape: tuple[int, ...], grid: tuple[int, ...]) -> float:
    """Return the share of a block's cells in one layer at each cut: what neighbours would read.

    No sample, of the first dim, reads another.
    """
    parts: defaultdict[int, int] = defaultdict(lambda: 1)
    for attribute, n in zip(sbp, grid, strict=True):
        if attribute.is_split:
            parts[attribute.dim] *= n
    read = {dim: n for dim, n in parts.items() if n > 1 and (dim or shape[dim] < n)}
    return sum(n / max(shape[dim], 1) for dim, n in read.items())
