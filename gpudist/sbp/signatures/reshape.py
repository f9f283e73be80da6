"""Functions that change the shape: ``reshape``, ``view``, ``flatten``, ``expand``, ``repeat``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import lcm, prod
from typing import Any

import torch

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.layout import partial_sum, split
from gpudist.sbp.call import Call, Function, Slot
from gpudist.sbp.registry import (
    AxisPart,
    Bind,
    Localize,
    SbpSignature,
    compose,
    forms,
    name_of,
    register,
)
from gpudist.sbp.signatures.fetching import Fetch, balanced_cut, fetching

Shape = tuple[int, ...]


def groups(source: Shape, target: Shape) -> Iterator[tuple[range, range]]:
    """Yield the smallest groups of adjacent dims with equally many cells in both shapes."""
    i = k = 0
    while i < len(source) and k < len(target):
        first, cells, wanted = (i, k), source[i], target[k]
        i, k = i + 1, k + 1
        while cells != wanted and (i < len(source) or k < len(target)):
            if i < len(source) and (cells < wanted or k == len(target)):
                cells, i = cells * source[i], i + 1
            else:
                wanted, k = wanted * target[k], k + 1
        yield range(first[0], i), range(first[1], k)


def leading(shape: Shape, dims: range) -> Iterator[int]:
    """Yield the dims of a group whose blocks are contiguous: all dims before them have length 1."""
    for dim in dims:
        yield dim
        if shape[dim] != 1:
            return


def block_shape(dim: int, sizes: Sequence[int] | None = None) -> Localize:
    """Return a ``localize`` for functions of a tensor and the shape of the result.

    Args:
        dim: split dim of the result.
        sizes: cells of each block of the result, if they differ from the input's.
    """

    def localize(call: Call, part: AxisPart) -> Call:
        shape = list(call.outputs[0].shape)
        if sizes is None:
            start, stop = part.cells(shape[dim])
            shape[dim] = stop - start
        else:
            shape[dim] = sizes[part.index]
        return replace(call, args=(Slot(0), tuple(shape)), kwargs={})

    return localize


@dataclass(frozen=True)
class Units:
    """A dim of the input whose units of cells become units of a dim of the result.

    Attributes:
        dim: dim of the input.
        other: dim of the result.
        extent: length of ``dim``.
        unit: number of cells in a unit of the input.
        made: number of cells in a unit of the result.
        parts: number of workers along the axis.
        localize: returns the ``localize`` for the result's dim and the sizes of its blocks.
        bind: binds the function of a block; see the registry.
    """

    dim: int
    other: int
    extent: int
    unit: int
    made: int
    parts: int
    localize: Callable[[int, Sequence[int]], Localize] | None = None
    bind: Bind | None = None

    def signature(self, sizes: tuple[int, ...] | None = None) -> SbpSignature | None:
        """Return the split with these sizes, or with the nearest sizes that keep units together."""
        attribute, unit = split(self.dim, sizes), self.unit
        stops = [attribute.blocks(self.extent, self.parts).block(i)[1] for i in range(self.parts)]
        if self.extent % unit:
            return None
        if any(stop % unit for stop in stops):
            # With fewer units, most workers would be idle from here on.
            if 2 * (self.extent // unit) < max(self.parts, 4):
                return None
            stops = [(stop + unit // 2) // unit * unit for stop in stops]
        sizes_of_input = [stop - start for start, stop in pairwise([0, *stops])]
        sizes_of_result = [length // unit * self.made for length in sizes_of_input]
        return SbpSignature(
            (split(self.dim, sizes_of_input),),
            (split(self.other, sizes_of_result),),
            None if self.localize is None else self.localize(self.other, sizes_of_result),
            recut=self.signature,
            bind=self.bind,
        )


def pairs(source: Shape, target: Shape, parts: int) -> Iterator[Units]:
    """Yield pairs of dims with contiguous blocks in both shapes; length 1 pairs with length 1."""
    for dims, others in groups(source, target):
        for dim in leading(source, dims):
            for other in leading(target, others):
                inner = prod(source[dim + 1 : dims.stop])
                other_inner = prod(target[other + 1 : others.stop])
                is_one = source[dim] == 1, target[other] == 1
                if inner and other_inner and is_one[0] == is_one[1]:
                    both = lcm(inner, other_inner)
                    unit, made = both // inner, both // other_inner
                    yield Units(dim, other, source[dim], unit, made, parts, block_shape)


@register(torch.reshape, any_cuts=True)
def reshape(call: Call, parts: int) -> list[SbpSignature]:
    """Split dims whose blocks keep their cells in order; linear."""
    source, target = call.shapes[0], call.outputs[0].shape
    signatures = [pair.signature() for pair in pairs(source, target, parts)]
    return [*filter(None, signatures), SbpSignature((partial_sum,), (partial_sum,))]


@register(torch.broadcast_to, any_cuts=True)
def expand(call: Call, parts: int) -> list[SbpSignature]:
    """Split dims that are not expanded."""
    source, target = call.shapes[0], call.outputs[0].shape
    new = len(target) - len(source)
    signatures = [
        SbpSignature((split(dim),), (split(dim + new),), block_shape(dim + new))
        for dim in range(len(source))
        if source[dim] == target[dim + new]
    ]
    return [*signatures, SbpSignature((partial_sum,), (partial_sum,))]


def tile_source(call: Call) -> dict[int, Fetch]:
    """Return the source of each cell of a tiled tensor along the tensor's own dims."""
    shape, times = call.shapes[0], tuple(call.get(1, "dims"))
    repeats = ((1,) * (len(shape) - len(times)) + times)[-len(shape) or len(times) :]
    return {
        dim: Fetch([*range(shape[dim])] * n, balanced_cut(shape[dim] * n))
        for dim, n in enumerate(repeats)
        if n != 1
    }


@register(torch.tile, any_cuts=True)
def tile(call: Call, parts: int) -> list[SbpSignature]:
    """Split dims that are not repeated; also repeated ones, if the result has no new dims."""
    shape, times = call.shapes[0], tuple(call.get(1, "dims"))
    new = max(len(times) - len(shape), 0)
    if not new:
        return fetching(call, parts, tile_source)
    signatures = [
        SbpSignature((split(dim),), (split(dim + new),))
        for dim in range(len(shape))
        if times[dim + new] == 1
    ]
    return [*signatures, SbpSignature((partial_sum,), (partial_sum,))]


def shape_by(function: Function, x: torch.Tensor, args: Any, kwargs: Any) -> Shape:
    """Return the shape of the result of ``function``."""
    arguments = [*args, *kwargs.values()]
    if any(isinstance(argument, (torch.dtype, torch.Tensor)) for argument in arguments):
        raise NotImplementedError(
            f"{name_of(function)} of a global tensor: an argument is a dtype or a tensor; pass "
            "sizes and dims as numbers, and use x.to(dtype) for another dtype"
        )
    with torch.no_grad():
        return tuple(function(torch.empty(x.shape, device="meta"), *args, **kwargs).shape)


def enter(function: Function, target: Function) -> None:
    """Register ``function`` as ``target``, a function of a tensor and the shape of the result."""

    @compose(function)
    def change_shape(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return target(x, shape_by(function, x, args, kwargs))


for function in [
    torch.Tensor.reshape,
    *forms("view", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"),
]:
    enter(function, torch.reshape)
for function in [torch.Tensor.expand, torch.Tensor.broadcast_to]:
    enter(function, torch.broadcast_to)


@compose(*forms("view_as", "reshape_as"))
def reshape_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.reshape(x, tuple(other.shape))


@compose(torch.Tensor.expand_as)
def expand_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.broadcast_to(x, tuple(other.shape))


@compose(torch.Tensor.repeat, torch.Tensor.tile)
def repeat(x: torch.Tensor, *times: Any) -> torch.Tensor:
    repeats = times[0] if len(times) == 1 and not isinstance(times[0], int) else times
    new = max(len(repeats) - x.dim(), 0)
    return torch.tile(x.reshape((1,) * new + tuple(x.shape)) if new else x, tuple(repeats))


def repeat_signature(dim: int, times: int, sizes: Shape) -> SbpSignature:
    """Return the signature for repeating each cell ``times`` times."""
    sizes_of_result = [times * size for size in sizes]
    return SbpSignature(
        (split(dim, sizes),),
        (split(dim, sizes_of_result),),
        recut=partial(repeat_signature, dim, times),
    )


@register(*forms("repeat_interleave"), any_cuts=True)
def repeat_interleave(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; every worker repeats its own cells."""
    times, along, dims = call.get(1, "repeats"), call.get(2, "dim"), call.tensors[0].dims
    signatures = [SbpSignature((partial_sum,), (partial_sum,))]
    if not isinstance(times, int) or len(call.tensors) != 1:
        raise NotImplementedError(
            "repeat_interleave of a global tensor: repeats is a tensor; pass a number"
        )
    if along is None and dims != 1:
        return signatures
    signatures += [
        repeat_signature(dim, times, Blocks(extent, parts).lengths)
        if dim == (along or 0) % dims
        else SbpSignature((split(dim),), (split(dim),))
        for dim, extent in enumerate(call.shapes[0])
    ]
    return signatures
