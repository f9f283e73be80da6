"""Distributed layers that convert between channels and features, or shuffle channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.boxes import Box
from gpudist.geometry.windows import ExpandedWindow, HaloWidths, SlidingWindow, Window
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import require_axes
from gpudist.nn.windowed.windowed_layer import Compute, DistributedWindowed
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


@layer(F.pixel_shuffle, Sample((2, 4, 9, 8)), upscale_factor=2)
class DistributedPixelShuffle(DistributedWindowed):
    """Convert channels to features: ``[..., C * r * r, H, W]`` to ``[..., C, H * r, W * r]``.

    ``r`` is the upscale factor, and ``P_x`` may split any dims. Output blocks are balanced in the
    last three dims. Channels are moved where a block ends within the ``r * r`` channels of an
    output.

    Args:
        P_x: partition of the input and the output.
        upscale_factor: as in the torch layer.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.

    Cost:
        No message if every block's outputs depend on its own cells only. For balanced blocks this
        holds if the workers evenly divide the last three dims of the output's shape over ``r``.
        Otherwise each worker sends one message to every worker whose outputs need its cells.
        Backward moves the same bytes.

    Raises:
        PartitionError, ShapeError: at construction, for invalid arguments; at the first call, on
            every rank alike, if ``r * r`` does not divide the channels.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        upscale_factor: int,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__(P_x, global_shape, shape)
        _require_plane(self._name, P_x)
        self.upscale_factor = _positive(self._name, "upscale_factor", upscale_factor)

    def _windows(self, layout: BlockLayout, x: torch.Tensor) -> tuple[Window, ...]:
        r, dims = self.upscale_factor, self.P_x.dim
        _require_multiple(self._name, layout, dims - 3, r * r, "upscale_factor squared")
        leading = (HaloWidths(),) * (dims - 3)
        return (*leading, SlidingWindow(r * r, r * r), ExpandedWindow(r), ExpandedWindow(r))

    def _computation(
        self,
        layout: BlockLayout,
        windows: Sequence[Window],
        cells: Box,
        outputs: Box,
        x: torch.Tensor,
    ) -> Compute:
        function = partial(_shuffle_pixels, F.pixel_shuffle, self.upscale_factor)
        return _Shuffle(function, _inside(windows, cells, outputs))


@layer(F.pixel_unshuffle, Sample((2, 3, 8, 6)), downscale_factor=2)
class DistributedPixelUnshuffle(DistributedWindowed):
    """Convert features to channels: ``[..., C, H * r, W * r]`` to ``[..., C * r * r, H, W]``.

    ``r`` is the downscale factor, and ``P_x`` may split any dims. Output blocks are balanced in the
    last three dims. Features are moved where a block ends within the ``r`` cells of an output.

    Args:
        P_x: partition of the input and the output.
        downscale_factor: as in the torch layer.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.

    Cost:
        No message if every block's outputs depend on its own cells only. For balanced blocks this
        holds if the workers evenly divide the last three dims of the input's shape, with features
        over ``r``. Otherwise each worker sends one message to every worker whose outputs need its
        cells. Backward moves the same bytes.

    Raises:
        PartitionError, ShapeError: at construction, for invalid arguments; at the first call, on
            every rank alike, if ``r`` does not divide the features.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        downscale_factor: int,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__(P_x, global_shape, shape)
        _require_plane(self._name, P_x)
        self.downscale_factor = _positive(self._name, "downscale_factor", downscale_factor)

    def _windows(self, layout: BlockLayout, x: torch.Tensor) -> tuple[Window, ...]:
        r, dims = self.downscale_factor, self.P_x.dim
        for d in (dims - 2, dims - 1):
            _require_multiple(self._name, layout, d, r, "downscale_factor")
        leading = (HaloWidths(),) * (dims - 3)
        return (*leading, ExpandedWindow(r * r), SlidingWindow(r, r), SlidingWindow(r, r))

    def _computation(
        self,
        layout: BlockLayout,
        windows: Sequence[Window],
        cells: Box,
        outputs: Box,
        x: torch.Tensor,
    ) -> Compute:
        function = partial(_shuffle_pixels, F.pixel_unshuffle, self.downscale_factor)
        return _Shuffle(function, _inside(windows, cells, outputs))


@layer(F.channel_shuffle, Sample((2, 4, 9, 8)), groups=2)
class DistributedChannelShuffle(DistributedWindowed):
    """Mix the channels of groups: ``[B, g, C / g, ...]`` becomes ``[B, C / g, g, ...]``.

    The tensor ``[B, C, ...]`` may be split in any dims except its channels.

    Args:
        P_x: partition of the input and the output.
        groups: as in the torch layer.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.

    Cost:
        No message.

    Raises:
        PartitionError, ShapeError: at construction, if the channels are split or ``groups`` is
            below 1; at the first call, on every rank alike, if it does not divide the channels.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        groups: int,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__(P_x, global_shape, shape)
        if P_x.dim < 3 or P_x.shape[1] > 1:
            raise PartitionError(
                f"{self._name}, dim 1: P_x has shape {list(P_x.shape)} but needs at least 3 axes "
                "with one worker along the channels; repartition the input first"
            )
        self.groups = _positive(self._name, "groups", groups)

    def _windows(self, layout: BlockLayout, x: torch.Tensor) -> tuple[Window, ...]:
        _require_multiple(self._name, layout, 1, self.groups, "groups")
        return (HaloWidths(),) * self.P_x.dim

    def _computation(
        self,
        layout: BlockLayout,
        windows: Sequence[Window],
        cells: Box,
        outputs: Box,
        x: torch.Tensor,
    ) -> Compute:
        return partial(_channel_shuffle, groups=self.groups)


@dataclass(frozen=True)
class _Shuffle:
    """Application of torch's function to a block, reduced to the needed part of its output."""

    function: Compute
    outputs: tuple[slice, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)[self.outputs].contiguous()


def _shuffle_pixels(shuffle: Any, factor: int, x: torch.Tensor) -> torch.Tensor:
    return shuffle(x, factor) if factor > 1 else x.clone()


def _channel_shuffle(x: torch.Tensor, groups: int) -> torch.Tensor:
    mixed = x.unflatten(1, (groups, -1)).transpose(1, 2)
    return mixed.clone(memory_format=torch.contiguous_format).flatten(1, 2)


def _inside(windows: Sequence[Window], cells: Box, outputs: Box) -> tuple[slice, ...]:
    """Return the slices of ``outputs`` within the output computed from ``cells``."""
    where: list[slice] = []
    for window, first, start, stop in zip(
        windows, cells.start, outputs.start, outputs.stop, strict=True
    ):
        if isinstance(window, ExpandedWindow):
            origin = first * window.factor
            where.append(slice(start - origin, stop - origin))
        else:
            where.append(slice(None))
    return tuple(where)


def _require_plane(name: str, P_x: CartesianPartition) -> None:
    require_axes(name, P_x, P_x.dim >= 3, "at least 3 axes: channels and 2 of features")


def _positive(name: str, what: str, value: int) -> int:
    if value < 1:
        raise ShapeError(f"{name}: {what} is {value} but must be at least 1")
    return value


def _require_multiple(name: str, layout: BlockLayout, dim: int, factor: int, what: str) -> None:
    extent = layout.decomposition.shape[dim]
    if extent % factor:
        raise ShapeError(
            f"{name}, dim {dim}: the global extent {extent} is not a multiple of {factor}, the "
            f"{what}; pad the input"
        )
