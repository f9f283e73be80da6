"""Derive the attributes of an operator's outputs from those of its inputs, axis by axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from threading import RLock
from typing import Any

import torch

from gpudist.cache import Cache
from gpudist.errors import ShapeError
from gpudist.geometry.layout import Layout, NdSbp, partial_sum, share_at_cuts
from gpudist.nn.autocast import LOW
from gpudist.sbp.boxing import boxed_bytes, least_bytes
from gpudist.sbp.call import Call, Spec
from gpudist.sbp.legal_signatures import (
    Views,
    block_call,
    calls_of_blocks,
    cuts_of,
    legal_signatures,
    signature_of_call,
)
from gpudist.sbp.registry import AxisPart, Bind, Rule, SbpSignature, name_of


@dataclass(frozen=True)
class Derivation:
    """How to execute an operator on a grid.

    Attributes:
        inputs: layouts that the operator requires of its inputs.
        outputs: layouts of the outputs.
        results: shapes, dtypes and strides of the global outputs.
        aliases: see :class:`Call`.
        tree: the results, with a ``Slot`` for each output.
        local: the call on this rank's block.
        bind: creates the function that replaces the operator, if any.
        bind_axes: axes whose signatures have this ``bind``.
        bytes: number of bytes that boxings move, over all ranks.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    results: tuple[Spec, ...]
    aliases: tuple[int | None, ...]
    tree: Any
    local: Call
    bind: Bind | None
    bind_axes: tuple[int, ...]
    bytes: int

    def with_arguments(self, call: Call) -> Derivation:
        """Return the derivation for different floats; signatures must not have ``localize``."""
        return replace(self, local=replace(self.local, args=call.args, kwargs=call.kwargs))


# One signature per axis, outer axis first.
_Path = tuple[SbpSignature, ...]
# Bytes of a boxing of a dtype, or a bound of them.
_Price = Callable[[Layout, Layout, torch.dtype], int]
# Shared by threads that are ranks of one world, so that each choice is computed once, and by worlds
# one after the other, such as those of a planner.
_choices = Cache[object, _Path](4096)
_derivations = Cache[object, Derivation](4096)
_choosing = RLock()


def derive(
    rule: Rule,
    call: Call,
    layouts: Sequence[Layout],
    index: tuple[int, ...] | None,
    key: object = None,
    held: int | None = None,
) -> Derivation:
    """Return the cheapest way to carry out ``call`` on tensors of these layouts.

    Args:
        rule: rule of the operator.
        call: the call, with global shapes.
        layouts: layouts of the tensors, all on one grid of the same ranks.
        index: index of this rank on the grid, ``None`` if it is outside.
        key: identifies rule, call, layouts and ``held``; a choice is computed once per key, and its
            derivation once for each index.
        held: tensor whose layout is kept, if a signature allows it, at any cost in bytes.

    Raises:
        ShapeError: on every rank alike, if no signature is legal.
    """

    def choose() -> _Path:
        return _choose(rule, call, layouts, held)

    if key is None:
        return _derivation(rule, call, layouts, index, choose())
    with _choosing:
        return _derivations.get_or_make(
            (key, index),
            lambda: _derivation(rule, call, layouts, index, _choices.get_or_make(key, choose)),
        )


def _derivation(
    rule: Rule, call: Call, layouts: Sequence[Layout], index: tuple[int, ...] | None, path: _Path
) -> Derivation:
    first = layouts[0]
    inputs = [layout.with_sbp(sbp) for layout, sbp in zip(layouts, _inputs_of(path), strict=True)]
    outputs = zip(*(signature.outputs for signature in path), strict=True)
    local, bind, axes = _call_of_block(
        rule, call, path, first.grid, index or (0,) * len(first.grid)
    )
    return Derivation(
        tuple(inputs),
        tuple(
            Layout(first.ranks, first.grid, sbp, spec.shape)
            for sbp, spec in zip(outputs, call.outputs, strict=True)
        ),
        call.outputs,
        call.aliases,
        call.tree,
        local,
        bind,
        axes,
        sum(map(boxed_bytes, layouts, inputs, map(_dtype_of_price, call.tensors))),
    )


def _choose(rule: Rule, call: Call, layouts: Sequence[Layout], held: int | None) -> _Path:
    path = _first_fitting(rule, call, layouts) or _cheapest(rule, call, layouts, held)
    if path is None:
        layouts_text = ", ".join(f"{layout.sbp}" for layout in layouts)
        raise ShapeError(
            f"{name_of(call.function)}: no signature fits inputs {layouts_text} of shapes "
            f"{list(map(list, call.shapes))}, also after boxing; compute on the whole tensor, "
            "x.full_tensor(), or on blocks, x.to_local()"
        )
    return path


def _sbp_in_place(rule: Rule, layouts: Sequence[Layout], axis: int) -> NdSbp | None:
    return (layouts[0].sbp[axis],) * 2 if rule.in_place else None


def _first_fitting(rule: Rule, call: Call, layouts: Sequence[Layout]) -> _Path | None:
    """Return the first signatures that need no boxing, if there is one for every axis."""
    views: Views = (call,)
    chosen: list[SbpSignature] = []
    for axis, parts in enumerate(layouts[0].grid):
        wanted = tuple(layout.sbp[axis] for layout in layouts)
        options = legal_signatures(
            rule, views, parts, _sbp_in_place(rule, layouts, axis), cuts_of(wanted), chosen
        )
        fitting = next((option for option in options if option.inputs == wanted), None)
        if fitting is None:
            return None
        chosen.append(fitting)
        views = calls_of_blocks(rule, views, fitting, parts)
    return tuple(chosen)


def _cheapest(rule: Rule, call: Call, layouts: Sequence[Layout], held: int | None) -> _Path | None:
    """Return the choice that moves the fewest bytes, counting sums that it leaves for later."""
    best: _Path | None = None
    least_price = 0
    paths = list(_paths(rule, (call,), layouts, ()))
    if held is not None:
        departures = [_departures(layouts, held, path) for path in paths]
        least = min(departures, default=None)
        paths = [path for path, n in zip(paths, departures, strict=True) if n == least]
    paths = _without_collecting(call, layouts, paths)
    inputs = list(map(_inputs_of, paths))
    dtypes = list(map(_dtype_of_price, call.tensors))
    is_view = not rule.in_place and any(
        slot is not None for slot in call.with_shapes(call.shapes).aliases
    )
    split_dims = {
        attribute.dim for layout in layouts for attribute in layout.sbp if attribute.is_split
    }

    # Many choices want a tensor in the same layout.
    @cache
    def price_of(price: _Price, slot: int, sbp: NdSbp) -> int:
        layout, dtype = layouts[slot], dtypes[slot]
        return price(layout, layout.with_sbp(sbp), dtype) + _left_to_sum(layout, sbp, dtype)

    def price_of_path(price: _Price, i: int) -> int:
        return sum(price_of(price, slot, sbp) for slot, sbp in enumerate(inputs[i]))

    bounds = [price_of_path(least_bytes, i) for i in range(len(paths))]

    def order(i: int) -> tuple[int, int, int, int, float]:
        """Order by the bound; among equals, split results, keep the inputs' dims, cut long ones.

        Later functions that read neighbouring cells, such as convolutions, then read few. Views
        rather split a dim beside the inputs': rows and columns of an image, and not its channels,
        which layers on channels would have to sum or collect.
        """
        dims = {attribute.dim for sbp in inputs[i] for attribute in sbp if attribute.is_split}
        results = list(zip(*(signature.outputs for signature in paths[i]), strict=True))
        whole = sum(not attribute.is_split for sbp in results for attribute in sbp)
        pairs = zip(results, call.outputs, strict=True)
        cuts = [share_at_cuts(sbp, spec.shape, layouts[0].grid) for sbp, spec in pairs]
        others = dims - split_dims
        far = sum(min(abs(a - b) for b in split_dims) for a in others) if split_dims else 0
        return bounds[i], whole, len(others), far * is_view, max(cuts, default=0.0)

    for i in sorted(range(len(paths)), key=order):
        if best is not None and bounds[i] >= least_price:
            break
        price = price_of_path(boxed_bytes, i)
        if best is None or price < least_price:
            best, least_price = paths[i], price
    return best


def _departures(layouts: Sequence[Layout], held: int, path: _Path) -> tuple[bool, int, int]:
    # Tensors with other numbers of dims, such as a bias, may be blocks or copies, but not terms.
    wanted = _inputs_of(path)
    sbp, dims = layouts[held].sbp, len(layouts[held].shape)
    ends = list(zip(layouts, wanted, strict=True))
    others = sum(sbp_on_path != sbp for layout, sbp_on_path in ends if len(layout.shape) == dims)
    terms = sum(
        partial_sum in sbp_on_path and partial_sum not in layout.sbp for layout, sbp_on_path in ends
    )
    return wanted[held] != sbp, others, terms


def _without_collecting(call: Call, layouts: Sequence[Layout], paths: list[_Path]) -> list[_Path]:
    """Drop the choices that collect blocks on one worker, if others keep all axes busy.

    To split a dim of one cell, such as a batch of one sample, moves few bytes. But it leaves the
    work and the memory to one worker, here and in all that follows.
    """
    grid = layouts[0].grid
    cells_of_inputs = [_cells_to_divide(layout.sbp, layout.shape, grid) for layout in layouts]
    divided_axes = [
        axis for axis in range(len(grid)) if max(cells[axis] for cells in cells_of_inputs) > 1
    ]
    shapes = (*call.shapes, *(spec.shape for spec in call.outputs))
    kept: list[_Path] = []
    is_any_busy = False
    for path in paths:
        slots = zip(*((*signature.inputs, *signature.outputs) for signature in path), strict=True)
        cells_on_path = [
            _cells_to_divide(sbp, shape, grid) for sbp, shape in zip(slots, shapes, strict=True)
        ]
        most = [max(cells[axis] for cells in cells_on_path) for axis in divided_axes]
        is_any_busy |= all(n > 1 for n in most)
        if 1 not in most:
            kept.append(path)
    return kept if is_any_busy else paths


def _cells_to_divide(sbp: NdSbp, shape: tuple[int, ...], grid: tuple[int, ...]) -> list[int]:
    """Return how many cells, or terms, each axis divides among its workers; 0 for copies."""
    counts: list[int] = []
    left = list(shape)
    for attribute, parts in zip(sbp, grid, strict=True):
        if attribute.is_split:
            counts.append(left[attribute.dim])
            left[attribute.dim] = -(-left[attribute.dim] // parts)
        else:
            counts.append(parts if attribute == partial_sum else 0)
    return counts


def _inputs_of(path: _Path) -> list[NdSbp]:
    return list(zip(*(signature.inputs for signature in path), strict=True))


# Bytes of sums over partial results, which a choice leaves for later.
def _left_to_sum(layout: Layout, sbp: NdSbp, dtype: torch.dtype) -> int:
    ends = zip(layout.sbp, sbp, layout.grid, strict=True)
    terms = prod(n for a, b, n in ends if b == partial_sum and a != partial_sum)
    return (terms - 1) * prod(layout.shape) * dtype.itemsize


# 16-bit numbers cost as much as float32. Otherwise autocast, under which a residual is in float32
# and what is added to it is not, would move each such sum to a layout that the next one leaves.
def _dtype_of_price(tensor: Spec) -> torch.dtype:
    return torch.float32 if tensor.dtype in LOW else tensor.dtype


def _paths(rule: Rule, views: Views, layouts: Sequence[Layout], outer: _Path) -> Iterator[_Path]:
    """Return every choice of one signature per axis that starts with ``outer``."""
    axis = len(outer)
    if axis == len(layouts[0].grid):
        yield outer
        return
    parts = layouts[0].grid[axis]
    present = tuple(layout.sbp[axis] for layout in layouts)
    for option in legal_signatures(
        rule, views, parts, _sbp_in_place(rule, layouts, axis), cuts_of(present), outer
    ):
        if option.only_unboxed and option.inputs != present:
            continue
        inner = (
            calls_of_blocks(rule, views, option, parts)
            if axis + 1 < len(layouts[0].grid)
            else views
        )
        yield from _paths(rule, inner, layouts, (*outer, option))


def _call_of_block(
    rule: Rule, call: Call, path: _Path, grid: tuple[int, ...], index: tuple[int, ...]
) -> tuple[Call, Bind | None, tuple[int, ...]]:
    """Return the call of the block at ``index``, and the replacement of its function, if any."""
    bind: Bind | None = None
    axes: list[int] = []
    for axis, (signature, parts) in enumerate(zip(path, grid, strict=True)):
        signature_of_block = signature_of_call(signature, rule, call, parts)
        # One worker has all that `run` would ask of others. Random numbers still go by the cells.
        is_alone = signature_of_block.run is not None and parts == 1 and rule.replicable
        if signature_of_block.binding is not None and not is_alone:
            bind = signature_of_block.binding
            axes.append(axis)
        call = block_call(call, signature_of_block, AxisPart(parts, index[axis]))
    return call, bind, tuple(axes)
