"""Distributed adaptive pools, which reduce parts of windows instead of gathering windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.geometry.parts import PartsWindow
from gpudist.geometry.windows import AdaptiveWindow
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import require_features
from gpudist.nn.pool.local import coordinates, flat_indices
from gpudist.nn.pool.ranges import adaptive_maxima, adaptive_means
from gpudist.nn.pool.sliding import refuse_empty
from gpudist.nn.pool.steps import MaximumStep, ReducedAxis, SumStep, maximum_step, sum_step
from gpudist.ops.operator import own_index, placeholder_shape
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition

OutputSize = int | Sequence[int | None]


@dataclass(frozen=True)
class _BoundAdaptivePool:
    """Reduction steps of a layer, bound to one input shape.

    Attributes:
        layout: layout of the input.
        origin: global index of the first local cell, per spatial dim.
        output_shape: shape of this worker's block of the output.
        moves: whether any window has cells or its output on another worker.
        are_irregular: whether windows differ in size, or overlap.
        steps: reductions, one per spatial dim, from the last dim to the first.
    """

    layout: BlockLayout
    origin: tuple[int, ...]
    output_shape: tuple[int, ...]
    moves: bool
    are_irregular: bool
    steps: tuple[Any, ...]


class _DistributedAdaptivePool(DistributedModule):
    _dims: int

    def __init__(
        self,
        P_x: CartesianPartition,
        output_size: OutputSize,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__()
        require_features(self._name, P_x, self._dims)
        self.P_x = P_x
        self.output_size = output_size
        self._sizes = _sizes(self._name, output_size, self._dims)
        self._agree_on(P_x, P_x.dim, global_shape, shape)

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> _BoundAdaptivePool:
        refuse_empty(self._name, layout.decomposition)
        index = own_index(self.P_x)
        inputs, steps, moves, are_irregular = layout.decomposition, [], False, False
        for dim in reversed(range(2, self.P_x.dim)):
            blocks = inputs.dims[dim]
            windows = AdaptiveWindow(self._output_extent(dim - 2, blocks.extent))
            parts = PartsWindow(blocks, windows)
            axis = ReducedAxis(dim, inputs, parts, self.P_x, layout.dtype)
            steps.append(self._step(axis, layout, x))
            moves |= axis.window.moves
            are_irregular |= blocks.extent % max(1, windows.output_extent) > 0
            inputs = axis.outputs()
        origin = layout.decomposition.block(index).start[2:]
        return _BoundAdaptivePool(
            layout, origin, inputs.block(index).shape, moves, are_irregular, tuple(steps)
        )

    def _output_extent(self, d: int, extent: int) -> int:
        size = self._sizes[d]
        return extent if size is None else size

    def _step(self, axis: ReducedAxis, layout: BlockLayout, x: torch.Tensor) -> Any:
        raise NotImplementedError


class DistributedAdaptiveAvgPool(_DistributedAdaptivePool):
    """Adaptive mean of a tensor partitioned by ``P_x`` in any dims.

    The input has shape ``[B, C, *spatial]``, the output ``[B, C, *output_size]`` in balanced
    blocks, some of them empty if there are more workers than outputs. Every worker sums its own
    cells of each window, dim by dim, and sends only these partial sums. A global mean sends one
    number per worker, sample and channel.

    Args:
        P_x: partition of the input and the output.
        output_size: as in the torch layer; ``None`` keeps the input's extent.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.

    Cost:
        One group of messages for each dim in which a window crosses blocks, from the last dim to
        the first, with one message from each worker of the axis that has a part of another worker's
        window. If outputs are partitioned like their windows, a block sends one layer of sums in
        each direction of an axis. Backward moves the same bytes. If no window crosses blocks,
        nothing is sent.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported arguments.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 4.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        bound: _BoundAdaptivePool = self._bindings(x, self._agree_and_bind)
        if not bound.moves and bound.are_irregular:
            return adaptive_means(x, bound.output_shape)
        for step in bound.steps:
            x = step(x)
        return x

    def _step(self, axis: ReducedAxis, layout: BlockLayout, x: torch.Tensor) -> SumStep:
        return sum_step(axis, x)


class _DistributedAdaptiveMaxPool(_DistributedAdaptivePool):
    """Adaptive maximum of a tensor partitioned by ``P_x`` in any dims.

    The input has shape ``[B, C, *spatial]``, the output ``[B, C, *output_size]`` in balanced
    blocks, some of them empty if there are more workers than outputs. Every worker takes the
    maximum of its own cells of each window, dim by dim, and sends only these maxima. Ties and NaN
    are resolved in favour of the same cell as in the torch layer, for values and gradients.

    Args:
        P_x: partition of the input and the output.
        output_size: as in the torch layer; ``None`` keeps the input's extent.
        return_indices: return ``(output, indices)``, with flat indices in the spatial dims of the
            global tensor.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.

    Cost:
        One group of messages for each dim in which a window crosses blocks, from the last dim to
        the first, with one message from each worker of the axis that has a part of another worker's
        window; indices add eight bytes per maximum. Backward moves the bytes of the maxima. If no
        window crosses blocks, nothing is sent.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported arguments.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        output_size: OutputSize,
        return_indices: bool = False,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        super().__init__(P_x, output_size, global_shape=global_shape, shape=shape)
        self.return_indices = return_indices

    def forward(self, x: torch.Tensor) -> Any:
        if self.P_x.active:
            y, places = self._maxima(x)
        else:
            y, places = x.clone(), None
        if not self.return_indices:
            return y
        if places is None:
            shape = y.shape if self.P_x.active else placeholder_shape(x)
            places = x.new_empty(shape, dtype=torch.int64)
        return y, places

    def _maxima(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        bound: _BoundAdaptivePool = self._bindings(x, self._agree_and_bind)
        places: torch.Tensor | None = None
        if bound.moves:
            for step in bound.steps:
                x, places = step(x, places, self.return_indices)
            return x, places
        y, places = adaptive_maxima(x, bound.output_shape)
        if 0 in bound.output_shape:
            return y, places
        cells = zip(coordinates(places, x.shape[2:]), bound.origin, strict=True)
        return y, flat_indices(
            [c + start for c, start in cells], bound.layout.decomposition.shape[2:]
        )

    def _step(self, axis: ReducedAxis, layout: BlockLayout, x: torch.Tensor) -> MaximumStep:
        return maximum_step(axis, x, prod(layout.decomposition.shape[axis.dim + 1 :]))


def _sizes(name: str, output_size: OutputSize, dims: int) -> tuple[int | None, ...]:
    """Return the global number of outputs per dim, ``None`` for the input's extent."""
    sizes = (output_size,) * dims if isinstance(output_size, int) else tuple(output_size)
    if len(sizes) != dims:
        raise ShapeError(
            f"{name}: output_size has {len(sizes)} entries but the layer has {dims} dims"
        )
    for d, size in enumerate(sizes):
        if size is None and dims == 1:
            raise ShapeError(
                f"{name}, dim 2: output_size is None, which torch's layer does not accept; pass "
                "the extent"
            )
        if size is not None and size < 0:
            raise ShapeError(f"{name}, dim {d + 2}: output_size {size} must be at least 0")
    return sizes


@layer(F.adaptive_avg_pool1d, Sample((2, 4, 9)), output_size=3)
class DistributedAdaptiveAvgPool1d(DistributedAdaptiveAvgPool):
    _dims = 1


@layer(F.adaptive_avg_pool2d, Sample((2, 4, 9, 8)), output_size=3)
class DistributedAdaptiveAvgPool2d(DistributedAdaptiveAvgPool):
    _dims = 2


@layer(F.adaptive_avg_pool3d, Sample((2, 4, 5, 6, 3)), output_size=3)
class DistributedAdaptiveAvgPool3d(DistributedAdaptiveAvgPool):
    _dims = 3


@layer(F.adaptive_max_pool1d, Sample((2, 4, 9)), output_size=3)
class DistributedAdaptiveMaxPool1d(_DistributedAdaptiveMaxPool):
    _dims = 1


@layer(F.adaptive_max_pool2d, Sample((2, 4, 9, 8)), output_size=3)
class DistributedAdaptiveMaxPool2d(_DistributedAdaptiveMaxPool):
    _dims = 2


@layer(F.adaptive_max_pool3d, Sample((2, 4, 5, 6, 3)), output_size=3)
class DistributedAdaptiveMaxPool3d(_DistributedAdaptiveMaxPool):
    _dims = 3
