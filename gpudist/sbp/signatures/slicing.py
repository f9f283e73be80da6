"""Parts of a tensor: ``x[...]`` by ints and slices, ``select``, ``narrow``, ``flip``, ``pad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.blocks import balanced_block
from gpudist.sbp.attributes import partial_sum, split
from gpudist.sbp.registry import Call, Localize, Part, Signature, Where, compose, forms, register


def kept(dims: Sequence[int], result: Sequence[int] | None = None) -> list[Signature]:
    """Splits of ``dims``, which are whole, and are ``result`` afterwards; and terms."""
    result = dims if result is None else result
    found = [Signature((split(a),), (split(b),)) for a, b in zip(dims, result, strict=True)]
    return [*found, Signature((partial_sum,), (partial_sum,))]


def index_by_dim(index: Any, dims: int) -> list[Any]:
    """Ints, slices and ``None``, one for each dim of the tensor and each new one."""
    given = list(index) if isinstance(index, tuple) else [index]
    for one in given:
        is_int = isinstance(one, int) and not isinstance(one, bool)
        if not (is_int or one is None or one is Ellipsis or isinstance(one, slice)):
            raise NotImplementedError(
                "x[...] of a global tensor takes ints, slices, None and ...; for indices use "
                "torch.index_select, for a mask torch.where"
            )
    missing = dims - sum(one is not None and one is not Ellipsis for one in given)
    at = next((i for i, one in enumerate(given) if one is Ellipsis), None)
    if at is None:
        return [*given, *[slice(None)] * missing]
    return [*given[:at], *[slice(None)] * missing, *given[at + 1 :]]


def local_ranges(taken: range, extent: int, parts: int) -> list[range]:
    """What each balanced block has of the cells ``taken``, counted from its first."""
    found: list[range] = []
    for i in range(parts):
        start, stop = balanced_block(extent, parts, i)
        first, end = (
            min(max(-(-(edge - taken.start) // taken.step), 0), len(taken))
            for edge in (start, stop)
        )
        own = taken[first:end]
        found.append(range(own.start - start, own.stop - start, own.step) if own else range(0))
    return found


def within(dim: int, ranges: Sequence[range]) -> Localize:
    """A block takes its own range of ``dim``."""

    def localize(call: Call, part: Part) -> Call:
        index = index_by_dim(call.args[1], call.tensors[0].dims)
        own = [i for i, one in enumerate(index) if one is not None]
        taken = ranges[part.index]
        index[own[dim]] = slice(taken.start, taken.stop, taken.step)
        return call.with_args(call.args[0], tuple(index))

    return localize


def at_zero(dim: int) -> Localize:
    """A block has its first cell of ``dim`` for the int's: the result's shape is the same."""

    def localize(call: Call, part: Part) -> Call:
        index = index_by_dim(call.args[1], call.tensors[0].dims)
        own = [i for i, one in enumerate(index) if one is not None]
        index[own[dim]] = 0
        return call.with_args(call.args[0], tuple(index))

    return localize


def run_index(call: Call, tensors: Sequence[Tensor], where: Where) -> Tensor:
    """What the block has of the result; zeros where the block does not have an int's cells."""
    (x,) = tensors
    cells = where.inputs[0]
    shape = where.call.shapes[0]
    index = index_by_dim(where.call.args[1], len(shape))
    local: list[Any] = []
    dim = 0
    for one in index:
        if isinstance(one, int):
            cell = one % shape[dim]
            if not cells.start[dim] <= cell < cells.stop[dim]:
                # The sum over no cells ties the graph.
                return x.new_zeros(where.outputs[0].shape) + x.reshape(-1)[:0].sum()
            one = cell - cells.start[dim]
        local.append(one)
        dim += one is not None
    return x[tuple(local)]


@register(Tensor.__getitem__, view=True)
def index(call: Call, parts: int) -> list[Signature]:
    """Dims of which all is taken; of a slice, the cells that each block has; and an int's dim:
    terms, all but one of them zero.
    """
    shape = call.shapes[0]
    dims: list[int] = []
    results: list[int] = []
    ints: list[Signature] = []
    slices: list[Signature] = []
    own = new = 0
    for one in index_by_dim(call.args[1], len(shape)):
        if isinstance(one, int) and shape[own] >= parts:
            ints.append(Signature((split(own),), (partial_sum,), at_zero(own), run_index))
        elif isinstance(one, slice) and range(*one.indices(shape[own])) == range(shape[own]):
            dims.append(own)
            results.append(new)
        elif isinstance(one, slice):
            ranges = local_ranges(range(*one.indices(shape[own])), shape[own], parts)
            cut = split(new, [len(taken) for taken in ranges])
            slices.append(Signature((split(own),), (cut,), within(own, ranges)))
        own += one is not None
        new += not isinstance(one, int)
    return [*kept(dims, results), *slices, *ints]


@compose(*forms("select"))
def select(x: Tensor, dim: int, index: int) -> Tensor:
    return x[(*[slice(None)] * (dim % x.dim()), index)]


@compose(*forms("narrow"))
def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    with torch.no_grad():
        torch.empty(x.shape, device="meta").narrow(dim, start, length)  # torch's own checks
    first = start % x.shape[dim] if start < 0 else start
    return x[(*[slice(None)] * (dim % x.dim()), slice(first, first + length))]


@register(*forms("flip"))
def flip(call: Call, parts: int) -> list[Signature]:
    """Dims that are not turned."""
    dims = call.tensors[0].dims
    given = call.args[1:] if len(call.args) > 1 else (call.kwargs["dims"],)
    turned = given if isinstance(given[0], int) else given[0]
    return kept([d for d in range(dims) if d not in {t % dims for t in turned}])


@register(*forms("roll"))
def roll(call: Call, parts: int) -> list[Signature]:
    """Dims along which nothing moves."""
    dims = call.tensors[0].dims
    given = call.get(2, "dims")
    rolled = range(dims) if given in (None, ()) else [given] if isinstance(given, int) else given
    return kept([d for d in range(dims) if d not in {r % dims for r in rolled}])


@register(torch.nn.functional.pad)
def pad(call: Call, parts: int) -> list[Signature]:
    """Dims without padding; terms, if there are zeros around, or cells of the tensor itself."""
    dims = call.tensors[0].dims
    widths = call.get(1, "pad")
    padded = {dims - 1 - i // 2 for i, width in enumerate(widths) if width}
    found = kept([d for d in range(dims) if d not in padded])
    is_linear = call.get(2, "mode", "constant") != "constant" or not call.get(3, "value")
    return found if is_linear else found[:-1]
