"""Distributed interpolation over any partition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.boxes import Box
from gpudist.geometry.interpolation import InterpolationMode, InterpolationWindow, Kernel
from gpudist.geometry.windows import HaloWidths, Window
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import require_features
from gpudist.nn.pool.adaptive import DistributedAdaptiveAvgPool
from gpudist.nn.windowed.resampling import (
    Interpolation,
    Resampling,
    interpolating_step,
    magnification,
    sum_dtype,
)
from gpudist.nn.windowed.windowed_layer import Compute, DistributedWindowed
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition

_ALONG_A_DIM: dict[str, InterpolationMode] = {
    "nearest": "nearest",
    "nearest-exact": "nearest-exact",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
    "bicubic": "cubic",
}
_DIMS = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
# Torch uses its small kernel in two dims if the sum of both extents is at most this.
_MOST_SMALL_OUTPUTS = 128
_NEAREST = ("nearest", "nearest-exact")


@layer(F.interpolate, Sample((2, 4, 9, 8)), scale_factor=2, mode="nearest")
class DistributedUpsample(DistributedWindowed):
    """Interpolate a tensor ``[B, C, *spatial]`` partitioned by ``P_x`` in any dims.

    There are one to three spatial dims, which may grow or shrink. Output blocks are balanced in the
    spatial dims, and split like the input in the others. Each output reads the same cells with the
    same weights as in torch's kernel for a contiguous tensor of that shape and dtype on that
    device, even where a position is rounded to a cell. The gradient is the exact adjoint; torch's
    own is not in two cases. Its backward kernels for the nearest modes round float64 positions to
    float32. They and the bicubic ones also ignore the scale factor if the extent stays the same or
    doubles.

    Args:
        P_x: partition of the input and the output.
        size, scale_factor, mode, align_corners, recompute_scale_factor: as in the torch layer;
            ``size`` is the global size of the spatial dims.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.

    Cost:
        One message from each worker whose cells this worker's outputs read, including neighbours at
        corners. Between balanced blocks the message is a layer as wide as an output reaches, plus a
        cell where inputs and outputs are not split at the same place. Backward moves the same
        bytes. If no output reads cells of another worker, nothing is sent and the block is not
        copied. ``"area"`` sums in parts, like an adaptive average pool.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported or inconsistent arguments; at
            the first call, on every rank alike, if the output is empty or torch does not
            interpolate the dtype.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__(P_x, global_shape, shape)
        self.mode = mode
        self.align_corners = align_corners
        self.recompute_scale_factor = recompute_scale_factor
        self._require_mode()
        self._dims = P_x.dim - 2
        self._require_one_of(size, scale_factor)
        self.size, self.scale_factor = size, scale_factor
        self._sizes = None if size is None else self._positive("size", size)
        self._scales: tuple[float, ...] = ()
        if scale_factor is not None:
            scales = self._positive("scale_factor", scale_factor)
            self._scales = tuple(map(float, scales))
            if not hasattr(scale_factor, "__len__"):
                self.scale_factor = self._scales[0]
        # Torch derives positions from the given scale factor, not from the ratio of the extents.
        self._keeps_scale = not (size is not None or recompute_scale_factor)
        self._means: _Means | None = None
        if mode == "area":
            self._means = _Means(P_x, self._output_extent, global_shape, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self._means is None else self._means(x)

    def _require_mode(self) -> None:
        name, mode, axes = self._name, self.mode, self.P_x.dim
        if mode != "area" and mode not in _ALONG_A_DIM:
            raise ShapeError(
                f"{name}: mode {mode!r} is not supported; it must be one of "
                f"{[*_ALONG_A_DIM, 'area']}"
            )
        if not 3 <= axes <= 5 or _DIMS.get(mode, axes - 2) != axes - 2:
            raise PartitionError(
                f"{name}: P_x has shape {list(self.P_x.shape)}, but mode {mode!r} takes "
                f"{_DIMS.get(mode, '1 to 3')} dims of features besides batch and channels"
            )
        if self.align_corners is not None and mode not in _DIMS:
            raise ShapeError(
                f"{name}: align_corners is given for mode {mode!r} but applies to {list(_DIMS)} "
                "only; omit it"
            )

    def _require_one_of(self, size: object, scale_factor: object) -> None:
        if (size is None) == (scale_factor is None):
            raise ShapeError(
                f"{self._name}: size is {size} and scale_factor {scale_factor}; give one of them"
            )
        if size is not None and self.recompute_scale_factor:
            raise ShapeError(
                f"{self._name}: recompute_scale_factor needs a scale_factor, not a size"
            )

    def _positive(self, what: str, value: Any) -> tuple[Any, ...]:
        """Return ``value`` for each spatial dim; raise if one is not positive."""
        values = tuple(value) if hasattr(value, "__len__") else (value,) * self._dims
        if len(values) != self._dims:
            raise ShapeError(
                f"{self._name}: {what} has {len(values)} entries but P_x has {self._dims} dims of "
                "features"
            )
        for d, number in enumerate(values):
            where = f"{self._name}, dim {d + 2}"
            if not 0 < number < math.inf:
                raise ShapeError(f"{where}: {what} {number} must be above 0")
        return values

    def _windows(self, layout: BlockLayout, x: torch.Tensor) -> tuple[Window, ...]:
        dtype = layout.dtype
        if not dtype.is_floating_point and not (dtype == torch.uint8 and self.mode in _NEAREST):
            raise ShapeError(
                f"{self._name}: torch does not interpolate {dtype} by {self.mode!r}; convert the "
                "input to a floating-point dtype"
            )
        extents = layout.decomposition.shape[2:]
        sizes = [self._output_extent(d, n) for d, n in enumerate(extents)]
        return (HaloWidths(), HaloWidths(), *self._interpolations(sizes, dtype, x.is_cuda))

    def _interpolations(
        self, sizes: Sequence[int], dtype: torch.dtype, on_cuda: bool
    ) -> tuple[Window, ...]:
        mode, kernel = _ALONG_A_DIM[self.mode], _kernel(sizes, on_cuda)
        single = dtype != torch.float64 or (self.mode in _NEAREST and kernel != "general")
        scales = self._scales if self._keeps_scale else (None,) * self._dims
        aligned = bool(self.align_corners)
        return tuple(
            InterpolationWindow(mode, size, scale, aligned, single, kernel)
            for size, scale in zip(sizes, scales, strict=True)
        )

    def _output_extent(self, d: int, extent: int) -> int:
        if self._sizes is not None:
            size, why = self._sizes[d], f"size {self._sizes[d]}"
        else:
            size, why = int(extent * self._scales[d]), f"scale_factor {self._scales[d]}"
        if extent < 1 or size < 1:
            raise ShapeError(
                f"{self._name}, dim {d + 2}: {extent} cells with {why} have no output; torch "
                "interpolates at least one cell to at least one"
            )
        return size

    def _computation(
        self,
        layout: BlockLayout,
        windows: Sequence[Window],
        cells: Box,
        outputs: Box,
        x: torch.Tensor,
    ) -> Compute:
        extents = layout.decomposition.shape
        if set(self.P_x.shape[2:]) == {1} and self._has_torchs_gradient(x.dtype):
            keeps = self._keeps_scale
            sizes, scales = (None, self._scales) if keeps else (outputs.shape[2:], None)
            return Interpolation(self.mode, sizes, scales, self.align_corners)
        cells_per_dim = list(zip(cells.start, cells.stop, strict=True))
        outputs_per_dim = list(zip(outputs.start, outputs.stop, strict=True))
        along = [window for window in windows if isinstance(window, InterpolationWindow)]
        factors = [window.exact_factor(n) for window, n in zip(along, extents[2:], strict=True)]
        if None not in factors:
            return magnification(
                self.mode, cast(list[int], factors), cells_per_dim[2:], outputs_per_dim[2:]
            )
        # Dims that shrink most are first, which reduces the work of later steps.
        dims = sorted(range(2, len(extents)), key=lambda d: (outputs.shape[d] / cells.shape[d], -d))
        steps = [
            interpolating_step(along[d - 2], extents[d], cells_per_dim[d], outputs_per_dim[d], d, x)
            for d in dims
        ]
        weighted = self.mode not in _NEAREST
        dtype = sum_dtype(x.dtype) if weighted else x.dtype
        return Resampling(tuple(step for step in steps if step is not None), dtype)

    def _has_torchs_gradient(self, dtype: torch.dtype) -> bool:
        if self.mode in _NEAREST:
            return not self._keeps_scale and dtype != torch.float64
        return not (self.mode == "bicubic" and self._keeps_scale)


class _Means(DistributedAdaptiveAvgPool):
    """Interpolation by ``"area"``: adaptive means."""

    def __init__(
        self,
        P_x: CartesianPartition,
        output_extent: Callable[[int, int], int],
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
    ) -> None:
        self._dims = P_x.dim - 2
        # Placeholder, because the output size depends on the input.
        super().__init__(P_x, (1,) * self._dims, global_shape=global_shape, shape=shape)
        self._name = DistributedUpsample.__name__
        self._extent_of = output_extent

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> Any:
        if not layout.dtype.is_floating_point:
            raise ShapeError(f"{self._name}: torch does not interpolate {layout.dtype} by 'area'")
        return super()._bind(layout, x)

    def _output_extent(self, d: int, extent: int) -> int:
        return self._extent_of(d, extent)


def _kernel(sizes: Sequence[int], on_cuda: bool) -> Kernel:
    if on_cuda:
        return "cuda"
    return "small" if len(sizes) == 2 and sum(sizes) <= _MOST_SMALL_OUTPUTS else "general"


@layer(F.interpolate, Sample((2, 4, 9, 8)), scale_factor=2)
class DistributedUpsamplingNearest2d(DistributedUpsample):
    """Nearest-neighbour :class:`DistributedUpsample` in two dims, like torch's layer.

    Args:
        P_x ... shape: see :class:`DistributedUpsample`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__(P_x, size, scale_factor, global_shape=global_shape, shape=shape)
        require_features(self._name, P_x, 2)


@layer(F.interpolate, Sample((2, 4, 9, 8)), scale_factor=2)
class DistributedUpsamplingBilinear2d(DistributedUpsample):
    """Bilinear :class:`DistributedUpsample` with aligned corners, like torch's layer.

    Args:
        P_x ... shape: see :class:`DistributedUpsample`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__(
            P_x, size, scale_factor, "bilinear", True, global_shape=global_shape, shape=shape
        )
