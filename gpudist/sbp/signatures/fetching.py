"""Functions that copy cells: each worker fetches the cells for its block of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product

import torch

from gpudist.exchange import Movement, bind
from gpudist.exchange.arrangement import Arrangement, bind_arrangement
from gpudist.exchange.autograd import concatenate, move
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.boxes import Box, Plan, stage_of
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.layout import partial_sum, split
from gpudist.sbp.call import Call, Compute
from gpudist.sbp.registry import SbpSignature, Where, name_of
from gpudist.world.partition import CartesianPartition

Range = tuple[int, int]
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Fetch:
    """Source of the cells along one dim of the result.

    Attributes:
        cells: cell of the input that each cell of the result copies.
        cut: maps the block sizes of the input to those of the result.
    """

    cells: Sequence[int]
    cut: Callable[[Sizes], Sizes]


# By dim; dims that are not listed are unchanged. Read from the call on global tensors.
Fetches = Mapping[int, Fetch]
Read = Callable[[Call], Fetches]


def as_before(sizes: Sizes) -> Sizes:
    """Return the block sizes of the input, for a result of the same extent."""
    return sizes


def balanced_cut(extent: int) -> Callable[[Sizes], Sizes]:
    """Return a function that gives balanced blocks, for a result of another extent."""

    return lambda sizes: Blocks(extent, len(sizes)).lengths


def fetching(call: Call, parts: int, read: Read, takes_empty: bool = True) -> list[SbpSignature]:
    """Return splits of all dims, and terms.

    Args:
        call: call of the function.
        parts: number of workers along the axis.
        read: reads the fetched dims from a call.
        takes_empty: whether the function accepts blocks without cells.
    """
    fetches = read(call)
    signatures: list[SbpSignature] = []
    for dim, extent in enumerate(call.shapes[0]):
        if dim not in fetches:
            others = None if takes_empty else partial(_bind, read)
            signatures.append(SbpSignature((split(dim),), (split(dim),), bind=others, cuts="all"))
        else:
            signatures.append(_fetch_signature(dim, extent, parts, fetches[dim], read))
    return [*signatures, SbpSignature((partial_sum,), (partial_sum,))]


def _fetch_signature(
    dim: int, extent: int, parts: int, fetch: Fetch, read: Read, sizes: Sizes | None = None
) -> SbpSignature:
    input_sizes = sizes or Blocks(extent, parts).lengths
    return SbpSignature(
        (split(dim, sizes),),
        (split(dim, fetch.cut(input_sizes)),),
        recut=partial(_fetch_signature, dim, extent, parts, fetch, read),
        bind=partial(_bind, read),
        nests=False,
    )


def _bind(read: Read, call: Call, where: Where) -> Compute:
    fetches = read(where.call)
    axes = [axis for axis, attribute in enumerate(where.sbps[0]) if attribute.dim in fetches]
    P, inputs = replace(where, P=where.P.along(axes)).cut(0)
    assert P.index is not None
    if P.size == 1 and 0 not in where.inputs[0].shape:
        return call
    dims = [_Dim.of(blocks, fetches.get(d)) for d, blocks in enumerate(inputs.dims)]
    movement = _movement(P, inputs, dims, where, 0)
    places = {d: dims[d].places(P.index[d], movement is not None) for d in sorted(fetches)}
    shape = inputs.block(P.index).shape if movement is None else movement.output_shape
    label, dtype = _label(where, 0), where.call.tensors[0].dtype
    arrange = bind_arrangement(places, shape, P, label, dtype)
    return _Fetching(movement, arrange)


def _movement(
    P: CartesianPartition, inputs: Decomposition, dims: Sequence[_Dim], where: Where, slot: int
) -> Movement | None:
    if all(dim.is_local for dim in dims):
        return None
    dtype = where.call.tensors[slot].dtype
    return bind(_plan(P, inputs, dims), P, _label(where, slot), dtype, (0,), dtype)


def _label(where: Where, slot: int) -> str:
    return f"{name_of(where.call.function)} of {list(where.call.shapes[slot])}"


def concat_signature(along: int, count: int) -> SbpSignature:
    """Return the signature of tensors concatenated along a split dim."""
    inputs, bind_all = (split(along),) * count, partial(_bind_joined, along)
    return SbpSignature(inputs, (split(along),), bind=bind_all, nests=False, cuts="inputs")


def _bind_joined(along: int, call: Call, where: Where) -> Compute:
    extents = [shape[along] for shape in where.call.shapes]
    movements: list[Movement | None] = []
    for slot, extent in enumerate(extents):
        P, inputs = where.cut(slot)
        first = sum(extents[:slot])
        result = Blocks(sum(extents), inputs.dims[along].parts)
        ends = [result.block(i) for i in range(result.parts)]
        sizes = [max(0, min(stop - first, extent) - max(start - first, 0)) for start, stop in ends]
        fetch = Fetch(range(extent), lambda _, sizes=tuple(sizes): sizes)
        dims = [
            _Dim.of(blocks, fetch if d == along else None) for d, blocks in enumerate(inputs.dims)
        ]
        movements.append(_movement(P, inputs, dims, where, slot))

    def compute(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        blocks = list(tensors)
        moving = [slot for slot, movement in enumerate(movements) if movement is not None]
        if moving:
            moved = move([m for m in movements if m is not None], [blocks[s] for s in moving])
            for slot, x in zip(moving, moved, strict=True):
                blocks[slot] = x
        return concatenate(blocks, along)

    return compute


class _Fetching:
    """Function that fetches cells and arranges them in the order of the result's block."""

    def __init__(self, movement: Movement | None, arrange: Arrangement | None) -> None:
        self.movement, self.arrange = movement, arrange

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        (x,) = tensors
        if self.movement is None and self.arrange is None:
            return x.clone()
        if self.movement is not None:
            (x,) = move((self.movement,), (x,))
        return x if self.arrange is None else self.arrange(x)


@dataclass(frozen=True)
class _Dim:
    """Cells that each worker needs along one dim.

    Attributes:
        inputs: blocks of the input.
        outputs: blocks of the result.
        cells: cell of the input for each cell of the result; ``None`` if the result is the input.
    """

    inputs: Blocks
    outputs: Blocks
    cells: tuple[int, ...] | None

    @classmethod
    def of(cls, inputs: Blocks, fetch: Fetch | None) -> _Dim:
        if fetch is None:
            return cls(inputs, inputs, None)
        sizes = fetch.cut(inputs.lengths)
        return cls(inputs, Blocks.of_sizes(sizes), tuple(fetch.cells))

    def needed(self, index: int) -> list[Range]:
        """Return the ranges of the input that the result's block needs, in ascending order."""
        return self._needed[index]

    @cached_property
    def _needed(self) -> list[list[Range]]:
        return [self._ranges(*self.outputs.block(i)) for i in range(self.outputs.parts)]

    def _ranges(self, start: int, stop: int) -> list[Range]:
        if self.cells is None:
            return [(start, stop)] if start < stop else []
        ranges: list[Range] = []
        for cell in sorted(set(self.cells[start:stop])):
            if ranges and ranges[-1][1] == cell:
                ranges[-1] = ranges[-1][0], cell + 1
            else:
                ranges.append((cell, cell + 1))
        return ranges

    @cached_property
    def is_local(self) -> bool:
        """Whether every worker has what it needs."""
        for index in range(self.inputs.parts):
            start, stop = self.inputs.block(index)
            if any(first < start or stop < last for first, last in self.needed(index)):
                return False
        return True

    @cached_property
    def overlaps(self) -> bool:
        """Whether more than one worker needs the same cell."""
        needed: set[int] = set()
        count = 0
        for index in range(self.inputs.parts):
            for cells in self.needed(index):
                needed.update(range(*cells))
                count += cells[1] - cells[0]
        return count > len(needed)

    def places(self, index: int, is_fetched: bool) -> list[int]:
        """Return the local positions of the cells that the result's cells are copies of."""
        start, stop = self.outputs.block(index)
        assert self.cells is not None
        ranges = self.needed(index) if is_fetched else [self.inputs.block(index)]
        there = {cell: i for i, cell in enumerate(c for r in ranges for c in range(*r))}
        return [there[cell] for cell in self.cells[start:stop]]

    def common(self, needs: int, gives: int) -> list[Range]:
        """Return the ranges that one worker needs and another holds."""
        first, last = self.inputs.block(gives)
        common = [(max(a, first), min(b, last)) for a, b in self.needed(needs)]
        return [(a, b) for a, b in common if a < b]


def _plan(P: CartesianPartition, inputs: Decomposition, dims: Sequence[_Dim]) -> Plan:
    """Return the plan of the boxes that this worker sends, receives and keeps."""
    assert P.index is not None and P.rank is not None
    index, offset = P.index, inputs.block(P.index).start
    along = list(enumerate(zip(dims, index, strict=True)))
    workers = [range(dim.inputs.parts) for dim in dims]
    wanted = [[(j, dim.common(j, i)) for j in workers[d]] for d, (dim, i) in along]
    gives = [(peer, box.relative_to(offset)) for peer, box in _boxes(wanted, P.shape)]
    owned = [[(j, dim.common(i, j)) for j in workers[d]] for d, (dim, i) in along]
    takes = [(peer, _compact(box, dims, index)) for peer, box in _boxes(owned, P.shape)]
    output_shape = tuple(
        sum(b - a for a, b in dim.needed(i)) for dim, i in zip(dims, index, strict=True)
    )
    overlap = any(dim.overlaps for dim in dims)
    stage = stage_of(P.rank, inputs.block(index).shape, output_shape, gives, takes, overlap)
    return Plan(("fetch", inputs, tuple(dims)), P.rank, (stage,))


def _boxes(
    along: Sequence[Sequence[tuple[int, list[Range]]]], grid: Sequence[int]
) -> Iterator[tuple[int, Box]]:
    # In an order that all ranks share.
    present = [[(i, ranges) for i, ranges in choices if ranges] for choices in along]
    for choice in product(*present):
        peer = rank_of([i for i, _ in choice], grid)
        for ranges in product(*(ranges for _, ranges in choice)):
            yield peer, Box(*map(tuple, zip(*ranges, strict=True)))


def _compact(box: Box, dims: Sequence[_Dim], index: Sequence[int]) -> Box:
    start = [
        sum(min(b, cell) - a for a, b in dim.needed(i) if a < cell)
        for dim, i, cell in zip(dims, index, box.start, strict=True)
    ]
    stop = [a + n for a, n in zip(start, box.shape, strict=True)]
    return Box(tuple(start), tuple(stop))
