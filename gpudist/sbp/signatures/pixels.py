"""Cells that become others' neighbours: shuffles, patches, and images sampled at places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from gpudist.sbp.attributes import Sbp, broadcast, partial_sum, split
from gpudist.sbp.registry import Call, Function, Localize, Part, Signature, forms, register
from gpudist.sbp.signatures.reshape import Units
from gpudist.sbp.signatures.slicing import kept
from gpudist.sbp.signatures.windows import given_numbers

_TERMS = Signature((partial_sum,), (partial_sum,))


def in_units(
    call: Call, parts: int, units: dict[int, tuple[int, int]], function: Function
) -> list[Signature]:
    """Splits of all dims: by dim, how many cells stay together, and how many they become.

    Args:
        function: in place of the call's, one that takes blocks without cells.
    """
    found: list[Signature | None] = []

    def on_blocks(dim: int, sizes: Sequence[int]) -> Localize:
        return lambda call, part: replace(call, function=function)

    for dim, extent in enumerate(call.shapes[0]):
        unit, made = units.get(dim, (1, 1))
        found.append(Units(dim, dim, extent, unit, made, parts, on_blocks).signature())
    return [*filter(None, found), _TERMS]


def _shuffled(input: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    if input.numel():
        return F.pixel_shuffle(input, upscale_factor)
    *leading, channels, rows, columns = input.shape
    features = channels // upscale_factor**2, rows * upscale_factor, columns * upscale_factor
    return input.reshape(*leading, *features)


def _unshuffled(input: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    if input.numel():
        return F.pixel_unshuffle(input, downscale_factor)
    *leading, channels, rows, columns = input.shape
    features = channels * downscale_factor**2, rows // downscale_factor, columns // downscale_factor
    return input.reshape(*leading, *features)


def _side_by_side(x: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    dim = dimension % x.dim()
    return x.unflatten(dim, (x.shape[dim] // size, size)).movedim(dim + 1, -1)


@register(*forms("pixel_shuffle"), any_cuts=True)
def pixel_shuffle(call: Call, parts: int) -> list[Signature]:
    """Channels in groups that become one; every worker's features become more."""
    dims, factor = call.tensors[0].dims, call.get(1, "upscale_factor")
    features = {dims - 3: (factor**2, 1), dims - 2: (1, factor), dims - 1: (1, factor)}
    return in_units(call, parts, features, _shuffled)


@register(*forms("pixel_unshuffle"), any_cuts=True)
def pixel_unshuffle(call: Call, parts: int) -> list[Signature]:
    """Features in groups that become channels."""
    dims, factor = call.tensors[0].dims, call.get(1, "downscale_factor")
    features = {dims - 3: (1, factor**2), dims - 2: (factor, 1), dims - 1: (factor, 1)}
    return in_units(call, parts, features, _unshuffled)


@register(*forms("channel_shuffle", "native_channel_shuffle"), any_cuts=True)
def channel_shuffle(call: Call, parts: int) -> list[Signature]:
    """Splits of all dims but that of the channels."""
    return kept([d for d in range(call.tensors[0].dims) if d != 1])


@register(torch.Tensor.unfold, view=True, any_cuts=True)
def sliding(call: Call, parts: int) -> list[Signature]:
    """Splits of other dims; of the dim itself where windows lie side by side."""
    dims = call.tensors[0].dims
    size, step = call.get(2, "size"), call.get(3, "step")
    if not dims:
        return [_TERMS]
    along = call.get(1, "dimension") % dims
    if size == step and not call.shapes[0][along] % size:
        return in_units(call, parts, {along: (size, 1)}, _side_by_side)
    return kept([d for d in range(dims) if d != along])


def _windows(call: Call, first: int) -> tuple[list[tuple[int, ...]], bool]:
    """Kernel, dilation, padding and stride; whether windows lie side by side."""
    names = ("kernel_size", "dilation", "padding", "stride")
    defaults = (None, 1, 0, 1)
    given = [
        given_numbers(call.get(first + i, name, default), 2)
        for i, (name, default) in enumerate(zip(names, defaults, strict=True))
    ]
    kernel, dilation, padding, stride = given
    return given, kernel == stride and dilation == (1, 1) and not any(padding)


def _steps(extent: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@register(F.unfold, any_cuts=True)
def unfold(call: Call, parts: int) -> list[Signature]:
    """Samples and channels; rows of windows that lie side by side."""
    if call.tensors[0].dims != 4:
        return [_TERMS]
    given, is_tiling = _windows(call, 1)
    (_, channels, rows, columns), kernel = call.shapes[0], given[0]
    found = [
        Signature((split(0),), (split(0),)),
        Units(1, 1, channels, 1, kernel[0] * kernel[1], parts, takes_empty=False).signature(),
    ]
    if is_tiling and not rows % kernel[0]:
        across = _steps(columns, *(numbers[1] for numbers in given))
        found.append(Units(2, 2, rows, kernel[0], across, parts, takes_empty=False).signature())
    return [*filter(None, found), _TERMS]


@register(F.fold, any_cuts=True)
def fold(call: Call, parts: int) -> list[Signature]:
    """As ``unfold``, backwards."""
    if call.tensors[0].dims != 3:
        return [_TERMS]
    given, is_tiling = _windows(call, 2)
    (_, channels, steps), kernel = call.shapes[0], given[0]
    rows, columns = given_numbers(call.get(1, "output_size"), 2)
    found = [
        Signature((split(0),), (split(0),)),
        Units(1, 1, channels, kernel[0] * kernel[1], 1, parts, takes_empty=False).signature(),
    ]
    if is_tiling and not rows % kernel[0]:
        across = _steps(columns, *(numbers[1] for numbers in given))
        by_rows = partial(_with_rows, columns)
        found.append(Units(2, 2, steps, across, kernel[0], parts, by_rows, False).signature())
    return [*filter(None, found), _TERMS]


def _with_rows(columns: int, dim: int, rows: Sequence[int]) -> Localize:
    def localize(call: Call, part: Part) -> Call:
        return call.replaced(1, "output_size", (rows[part.index], columns))

    return localize


@register(F.grid_sample, any_cuts=True)
def grid_sample(call: Call, parts: int) -> list[Signature]:
    """Samples; channels of the image; places of the grid, for which the image is whole."""
    image, grid = call.tensors
    rows: list[tuple[Sbp, Sbp, int]] = [(split(0), split(0), 0), (split(1), broadcast, 1)]
    rows += [(broadcast, split(d), d + 1) for d in range(1, grid.dims - 1)]
    extents = [image.shape[0], image.shape[1], *grid.shape[1:-1]]
    found = [
        _sampled(a, b, dim) for (a, b, dim), n in zip(rows, extents, strict=True) if n >= parts
    ]
    return [*filter(None, found), Signature((partial_sum, broadcast), (partial_sum,))]


def _sampled(
    image: Sbp, grid: Sbp, dim: int, sizes: tuple[int, ...] | None = None
) -> Signature | None:
    """None of the blocks is empty."""
    if sizes is not None and not min(sizes):
        return None
    inputs = tuple(split(one.dim, sizes) if one.is_split else one for one in (image, grid))
    again = partial(_sampled, image, grid, dim)
    return Signature(inputs, (split(dim, sizes),), recut=again)


@register(F.affine_grid, any_cuts=True)
def affine_grid(call: Call, parts: int) -> list[Signature]:
    """Samples."""
    count = call.shapes[0][0]

    def localize(call: Call, part: Part) -> Call:
        start, stop = part.cells(count)
        return call.replaced(1, "size", [stop - start, *call.get(1, "size")[1:]])

    def samples(sizes: tuple[int, ...] | None = None) -> Signature | None:
        if sizes is not None and not min(sizes):
            return None
        return Signature((split(0, sizes),), (split(0, sizes),), localize, recut=samples)

    found = [samples()] if count >= parts else []
    return [*filter(None, found)]
