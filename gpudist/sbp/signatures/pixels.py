"""Functions of pixels: shuffles, patches, and images sampled at points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.layout import Sbp, broadcast, partial_sum, split
from gpudist.nn.affine.local_conv import number_per_dim
from gpudist.sbp.call import Call, on_meta
from gpudist.sbp.registry import AxisPart, Localize, SbpSignature, compose, forms, register
from gpudist.sbp.signatures.along_axis import on_cells
from gpudist.sbp.signatures.channel_norms import call_rule
from gpudist.sbp.signatures.fetching import Fetch, balanced_cut, fetching
from gpudist.sbp.signatures.reshape import Units
from gpudist.sbp.signatures.slicing import splits_of_full_dims

_TERMS = SbpSignature((partial_sum,), (partial_sum,))


def in_units(
    call: Call,
    parts: int,
    units: dict[int, tuple[int, int]],
    localize: Callable[[int, Sequence[int]], Localize] | None = None,
) -> list[SbpSignature]:
    """Return splits of all dims between units, groups of cells that stay together.

    Args:
        call: call of the function.
        parts: number of workers along the axis.
        units: for each dim, the number of cells in a unit of the input and of the result.
        localize: see :class:`~gpudist.sbp.signatures.reshape.Units`; without it, blocks without
            cells are not passed to the function.
    """
    signatures: list[SbpSignature | None] = []
    for dim, extent in enumerate(call.shapes[0]):
        unit, made = units.get(dim, (1, 1))
        bind = on_cells if localize is None else None
        signatures.append(Units(dim, dim, extent, unit, made, parts, localize, bind).signature())
    return [*filter(None, signatures), _TERMS]


def _on_blocks(dim: int, sizes: Sequence[int]) -> Localize:
    # A bound function would not return a view.
    return lambda call, part: replace(call, function=_side_by_side)


def _side_by_side(x: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    dim = dimension % x.dim()
    return x.unflatten(dim, (x.shape[dim] // size, size)).movedim(dim + 1, -1)


@register(*forms("pixel_shuffle"), any_cuts=True)
def pixel_shuffle(call: Call, parts: int) -> list[SbpSignature]:
    """Split channels between units that become one channel; split features, which are upscaled."""
    dims, factor = call.tensors[0].dims, call.get(1, "upscale_factor")
    features = {dims - 3: (factor**2, 1), dims - 2: (1, factor), dims - 1: (1, factor)}
    return in_units(call, parts, features)


@register(*forms("pixel_unshuffle"), any_cuts=True)
def pixel_unshuffle(call: Call, parts: int) -> list[SbpSignature]:
    """Split features between units that become channels; split channels."""
    dims, factor = call.tensors[0].dims, call.get(1, "downscale_factor")
    features = {dims - 3: (1, factor**2), dims - 2: (factor, 1), dims - 1: (factor, 1)}
    return in_units(call, parts, features)


# On meta tensors, torch returns a view for a single group.
for _function in forms("channel_shuffle", "native_channel_shuffle"):
    on_meta[_function] = lambda x, groups: F.channel_shuffle(x, groups).clone()


@register(*forms("channel_shuffle", "native_channel_shuffle"), any_cuts=True)
def channel_shuffle(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims except the channels."""
    return splits_of_full_dims([d for d in range(call.tensors[0].dims) if d != 1])


@register(torch.Tensor.unfold, any_cuts=True)
def sliding(call: Call, parts: int) -> list[SbpSignature]:
    """Split other dims, and the dim itself if the windows tile it."""
    dims = call.tensors[0].dims
    size, step = call.get(2, "size"), call.get(3, "step")
    if not dims:
        return [_TERMS]
    along = call.get(1, "dimension") % dims
    if size == step and not call.shapes[0][along] % size:
        return in_units(call, parts, {along: (size, 1)}, _on_blocks)
    return splits_of_full_dims([d for d in range(dims) if d != along])


def _numbers_and_is_tiling(
    kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> tuple[list[tuple[int, ...]], bool]:
    arguments = [number_per_dim(x, 2) for x in (kernel_size, dilation, padding, stride)]
    kernel, dilation, padding, stride = arguments
    return arguments, kernel == stride and dilation == (1, 1) and not any(padding)


def _steps(extent: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    return (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def side_by_side(
    x: torch.Tensor, dim: int, size: int, step: int, dilation: int = 1
) -> torch.Tensor:
    """Copy the windows along a dim, one after the other."""
    windows = x.unfold(dim, dilation * (size - 1) + 1, step)[..., ::dilation]
    return windows.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _cells(extent: int, size: int, step: int, dilation: int) -> list[int]:
    steps = _steps(extent, size, dilation, 0, step)
    return [i * step + k * dilation for i in range(steps) for k in range(size)]


# Blocks of the result have whole windows.
def _sources_of_windows(call: Call) -> dict[int, Fetch]:
    dim, size, step, dilation = (*call.args[1:], 1)[:4]
    cells = _cells(call.shapes[0][dim], size, step, dilation)
    cut = balanced_cut(len(cells) // size)
    return {dim: Fetch(cells, lambda sizes: tuple(size * n for n in cut(sizes)))}


@register(side_by_side, any_cuts=True)
def windows_side_by_side(call: Call, parts: int) -> list[SbpSignature]:
    """Split all dims; a split of the windowed one fetches the cells that its windows read."""
    return fetching(call, parts, _sources_of_windows)


@compose(F.unfold)
def unfold(
    input: torch.Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> torch.Tensor:
    """Copy windows; rows of windows that do not tile the input are those of a halo."""
    arguments, is_tiling = _numbers_and_is_tiling(kernel_size, dilation, padding, stride)
    kernel, dilations, paddings, strides = arguments
    if input.dim() != 4 or is_tiling:
        return call_rule(windows_unfolded, input, *arguments)
    x = input
    for axis in range(2):
        dim = 2 + 2 * axis
        x = F.pad(x, (0, 0) * (1 - axis) + (paddings[axis],) * 2)
        x = call_rule(side_by_side, x, dim, kernel[axis], strides[axis], dilations[axis])
        x = x.unflatten(dim, (-1, kernel[axis]))
    return x.permute(0, 1, 3, 5, 2, 4).flatten(4).flatten(1, 3)


def windows_unfolded(
    input: torch.Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> torch.Tensor:
    """Call ``F.unfold``, whose rule is a composition."""
    return F.unfold(input, kernel_size, dilation, padding, stride)


@register(windows_unfolded, any_cuts=True)
def unfold_tiles(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples and channels, and rows of windows that tile the input."""
    if call.tensors[0].dims != 4:
        return [_TERMS]
    arguments, is_tiling = _numbers_and_is_tiling(*call.args[1:])
    (_, channels, rows, columns), kernel = call.shapes[0], arguments[0]
    signatures = [
        SbpSignature((split(0),), (split(0),)),
        Units(1, 1, channels, 1, kernel[0] * kernel[1], parts, bind=on_cells).signature(),
    ]
    if is_tiling and not rows % kernel[0]:
        across = _steps(columns, *(numbers[1] for numbers in arguments))
        signatures.append(Units(2, 2, rows, kernel[0], across, parts, bind=on_cells).signature())
    return [*filter(None, signatures), _TERMS]


@register(F.fold, any_cuts=True)
def fold(call: Call, parts: int) -> list[SbpSignature]:
    """Split like ``unfold``, in the other direction."""
    if call.tensors[0].dims != 3:
        return [_TERMS]
    arguments, is_tiling = _numbers_and_is_tiling(
        call.get(2, "kernel_size"),
        call.get(3, "dilation", 1),
        call.get(4, "padding", 0),
        call.get(5, "stride", 1),
    )
    (_, channels, steps), kernel = call.shapes[0], arguments[0]
    rows, columns = number_per_dim(call.get(1, "output_size"), 2)
    signatures = [
        SbpSignature((split(0),), (split(0),)),
        Units(1, 1, channels, kernel[0] * kernel[1], 1, parts, bind=on_cells).signature(),
    ]
    if is_tiling and not rows % kernel[0]:
        across = _steps(columns, *(numbers[1] for numbers in arguments))
        by_rows = partial(_with_rows, columns)
        signatures.append(
            Units(2, 2, steps, across, kernel[0], parts, by_rows, on_cells).signature()
        )
    return [*filter(None, signatures), _TERMS]


def _with_rows(columns: int, dim: int, rows: Sequence[int]) -> Localize:
    def localize(call: Call, part: AxisPart) -> Call:
        return call.with_argument(1, "output_size", (rows[part.index], columns))

    return localize


@register(F.grid_sample, any_cuts=True)
def grid_sample(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples, channels of the image, or points of the grid with the whole image."""
    image, grid = call.tensors
    rows: list[tuple[Sbp, Sbp, int]] = [(split(0), split(0), 0), (split(1), broadcast, 1)]
    rows += [(broadcast, split(d), d + 1) for d in range(1, grid.dims - 1)]
    extents = [image.shape[0], image.shape[1], *grid.shape[1:-1]]
    signatures = [
        SbpSignature((a, b), (split(dim),), cuts="all", takes_empty=False)
        for (a, b, dim), n in zip(rows, extents, strict=True)
        if n >= parts
    ]
    return [*signatures, SbpSignature((partial_sum, broadcast), (partial_sum,))]


@register(F.affine_grid, any_cuts=True)
def affine_grid(call: Call, parts: int) -> list[SbpSignature]:
    """Split samples."""
    count = call.shapes[0][0]

    def localize(call: Call, part: AxisPart) -> Call:
        start, stop = part.cells(count)
        return call.with_argument(1, "size", [stop - start, *call.get(1, "size")[1:]])

    samples = (split(0),), (split(0),)
    signature = SbpSignature(*samples, localize, cuts="all", takes_empty=False)
    return [signature] if count >= parts else []
