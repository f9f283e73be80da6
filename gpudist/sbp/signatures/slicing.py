"""Slices of a tensor: ``x[...]`` with ints and slices, ``narrow``, ``flip``, ``roll``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpudist.geometry.layout import partial_sum, split
from gpudist.sbp.call import Call
from gpudist.sbp.registry import AxisPart, SbpSignature, Where, compose, forms, register
from gpudist.sbp.signatures.fetching import Fetch, as_before, fetching
from gpudist.sbp.views import forget, is_copy


def splits_of_full_dims(
    dims: Sequence[int], result: Sequence[int] | None = None
) -> list[SbpSignature]:
    """Return splits of dims taken in full, which are ``result`` in the result, and terms."""
    result = dims if result is None else result
    signatures = [SbpSignature((split(a),), (split(b),)) for a, b in zip(dims, result, strict=True)]
    return [*signatures, SbpSignature((partial_sum,), (partial_sum,))]


def index_by_dim(index: Any, dims: int) -> list[Any]:
    """Return one int, slice or ``None`` for each dim of the tensor and each new dim."""
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        is_int = isinstance(entry, int) and not isinstance(entry, bool)
        if not (is_int or entry is None or entry is Ellipsis or isinstance(entry, slice)):
            raise NotImplementedError(
                "x[...] of a global tensor takes ints, slices, None and ...; for indices use "
                "torch.index_select, for a mask torch.where"
            )
    missing = dims - sum(entry is not None and entry is not Ellipsis for entry in entries)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), None)
    if at is None:
        return [*entries, *[slice(None)] * missing]
    return [*entries[:at], *[slice(None)] * missing, *entries[at + 1 :]]


def own_cells(taken: range, part: AxisPart, extent: int) -> range:
    """Return which of the ``taken`` cells a block holds, counted from its first cell."""
    start, stop = part.cells(extent)
    first, end = (
        min(max(-(-(edge - taken.start) // taken.step), 0), len(taken)) for edge in (start, stop)
    )
    cells = taken[first:end]
    return range(cells.start - start, cells.stop - start, cells.step) if cells else range(0)


def slice_signature(
    dim: int, new: int, taken: range, extent: int, parts: int, sizes: tuple[int, ...] | None = None
) -> SbpSignature:
    """Return the signature for a slice of dim ``dim``, which is dim ``new`` of the result."""

    def localize(call: Call, part: AxisPart) -> Call:
        cells = own_cells(taken, part, extent)
        return with_index(call, dim, slice(cells.start, cells.stop, cells.step))

    workers = [AxisPart(parts, i, sizes) for i in range(parts)]
    left = [len(own_cells(taken, part, extent)) for part in workers]
    return SbpSignature(
        (split(dim, sizes),),
        (split(new, left),),
        localize,
        recut=partial(slice_signature, dim, new, taken, extent, parts),
    )


def with_index(call: Call, dim: int, entry: int | slice) -> Call:
    """Return the call with another index for ``dim``."""
    index = index_by_dim(call.args[1], call.tensors[0].dims)
    places = [i for i, entry in enumerate(index) if entry is not None]
    index[places[dim]] = entry
    return call.with_argument(1, "index", tuple(index))


def in_terms(dim: int, sizes: tuple[int, ...] | None = None) -> SbpSignature | None:
    """Return the signature for a dim indexed by an int: terms, of which all but one are zero.

    Shapes follow from indexing each block at its first cell. Blocks must not be empty.
    """
    if sizes is not None and not min(sizes):
        return None

    def localize(call: Call, part: AxisPart) -> Call:
        return with_index(call, dim, 0)

    again = partial(in_terms, dim)
    return SbpSignature((split(dim, sizes),), (partial_sum,), localize, run_index, again)


def run_index(call: Call, tensors: Sequence[Tensor], where: Where) -> Tensor:
    """Return the block's part of the result; zeros if the block lacks a cell indexed by an int."""
    (x,) = tensors
    cells = where.inputs[0]
    shape = where.call.shapes[0]
    index = index_by_dim(where.call.args[1], len(shape))
    # Slices have already been localized to the block.
    local = index_by_dim(call.args[1], len(shape))
    dim = 0
    for i, entry in enumerate(index):
        if isinstance(entry, int):
            cell = entry % shape[dim]
            if not cells.start[dim] <= cell < cells.stop[dim]:
                none = x.new_zeros(where.outputs[0].shape)
                # A sum over no cells connects the graph; for integers, its dtype would differ.
                return none + x.reshape(-1)[:0].sum() if x.requires_grad else none
            local[i] = cell - cells.start[dim]
        dim += entry is not None
    return x[tuple(local)]


@register(Tensor.__getitem__, any_cuts=True)
def index(call: Call, parts: int) -> list[SbpSignature]:
    """Split dims taken in full, sliced dims, and dims indexed by an int."""
    shape = call.shapes[0]
    dims: list[int] = []
    results: list[int] = []
    ints: list[SbpSignature] = []
    slices: list[SbpSignature] = []
    dim = new = 0
    has_sum = call.tensors[0].dtype != torch.bool
    for entry in index_by_dim(call.args[1], len(shape)):
        if isinstance(entry, int) and shape[dim] >= parts and has_sum:
            ints += filter(None, [in_terms(dim)])
        elif isinstance(entry, slice) and range(*entry.indices(shape[dim])) == range(shape[dim]):
            dims.append(dim)
            results.append(new)
        elif isinstance(entry, slice):
            taken = range(*entry.indices(shape[dim]))
            slices.append(slice_signature(dim, new, taken, shape[dim], parts))
        dim += entry is not None
        new += not isinstance(entry, int)
    return [*splits_of_full_dims(dims, results), *slices, *ints]


@compose(Tensor.__setitem__)
def set_index(x: Any, index: Any, value: Any) -> None:
    """Write to ``x[index]``; ints that index a split dim are replaced by slices."""
    if not hasattr(x, "_local"):
        raise NotImplementedError(
            "x[...] = value: x is a plain tensor, but the value or an index is global; convert x "
            "with gpudist.to_global"
        )
    if isinstance(index, Tensor) and index.dtype == torch.bool and not _has_dims(value):
        mask = index.reshape(*index.shape, *[1] * (x.dim() - index.dim()))
        x.masked_fill_(mask, value)
        return
    by_dim = index_by_dim(index, x.dim())
    split_dims = {attribute.dim for attribute in x.sbp if attribute.is_split}
    ints = {d: i for d, i in enumerate(_without_new(by_dim)) if isinstance(i, int)}
    if ints.keys() & split_dims:
        index = _without_new(by_dim)
        for d, i in ints.items():
            if not -x.shape[d] <= i < x.shape[d]:
                raise IndexError(
                    f"index {i} is out of bounds for dimension {d} with size {x.shape[d]}"
                )
            index[d] = slice(i % x.shape[d], i % x.shape[d] + 1)
        index = tuple(index)
        value = _with_dims_of_ints(value, by_dim) if _has_dims(value) else value
    cells = _require_shared(x[index])
    if not _has_dims(value):
        cells.fill_(value)
        return
    while value.dim() > cells.dim() and value.shape[0] == 1:
        value = value.squeeze(0)
    cells.copy_(value)


def _without_new(by_dim: Sequence[Any]) -> list[Any]:
    return [entry for entry in by_dim if entry is not None]


def _with_dims_of_ints(value: Tensor, by_dim: Sequence[Any]) -> Tensor:
    """Give ``value`` a dim for each int, and remove that of each ``None``, from the last one on."""
    dim = value.dim()
    for entry in reversed(by_dim):
        if isinstance(entry, int):
            value = value.unsqueeze(dim)
        elif dim == 0:
            break
        else:
            dim -= 1
            value = value.squeeze(dim) if entry is None else value
    return value


def _require_shared(cells: Any) -> Any:
    if is_copy(cells):
        # The error may keep it alive, for longer on some ranks; nobody reads it any more.
        forget(cells)
        raise NotImplementedError(
            "x[...] = value: the slice does not share memory with x; box x with to_global first"
        )
    return cells


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


@compose(*forms("select"))
def select(x: Tensor, dim: int, index: int) -> Tensor:
    return x[(*[slice(None)] * (dim % x.dim()), index)]


@compose(*forms("narrow"))
def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    start = int(start)  # of a tensor
    # Only for torch's own checks.
    torch.empty(x.shape, device="meta").narrow(dim, start, length)
    first = start + (x.shape[dim] if start < 0 else 0)
    return x[(*[slice(None)] * (dim % x.dim()), slice(first, first + length))]


def flip_source(call: Call) -> dict[int, Fetch]:
    """Return the source of each cell of a flipped tensor."""
    shape = call.shapes[0]
    arguments = call.args[1:] if len(call.args) > 1 else (call.kwargs["dims"],)
    dims = arguments if isinstance(arguments[0], int) else arguments[0]
    cells = {d % len(shape): range(shape[d % len(shape)])[::-1] for d in dims}
    return {d: Fetch(cells[d], as_before) for d in cells}


@register(*forms("flip"), any_cuts=True)
def flip(call: Call, parts: int) -> list[SbpSignature]:
    return fetching(call, parts, flip_source)


compose(*forms("fliplr"))(partial(torch.flip, dims=(1,)))
compose(*forms("flipud"))(partial(torch.flip, dims=(0,)))


def roll_source(call: Call) -> dict[int, Fetch]:
    """Return the source of each cell of a rolled tensor."""
    shape = call.shapes[0]
    shifts, argument = call.get(1, "shifts"), call.get(2, "dims")
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [argument] if isinstance(argument, int) else argument
    total: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        total[dim % len(shape)] = total.get(dim % len(shape), 0) + shift
    return {
        dim: Fetch([(i - shift) % shape[dim] for i in range(shape[dim])], as_before)
        for dim, shift in total.items()
    }


@register(*forms("roll"), any_cuts=True)
def roll(call: Call, parts: int) -> list[SbpSignature]:
    if call.get(2, "dims") in (None, (), []):
        # Without dims, torch rolls the flattened tensor.
        return [SbpSignature((partial_sum,), (partial_sum,))]
    return fetching(call, parts, roll_source)
