"""Base class of pools: windows that slide over a partitioned tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import lt
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import move
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import ComposedWindow, PoolWindow, Read
from gpudist.nn.partitions import require_features
from gpudist.nn.pool.local import MAXIMUM, MEAN, coordinates, flat_indices, no_samples
from gpudist.nn.windowed.region_layer import BlockOperation, RegionLayer
from gpudist.nn.windowed.window import per_dim
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import own_index
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


def refuse_empty(name: str, inputs: Decomposition) -> None:
    """Raise for an input without channels or features, like torch."""
    for d, extent in enumerate(inputs.shape):
        if d > 0 and extent == 0:
            raise ShapeError(f"{name}, dim {d}: the input has no cells; only a batch may be empty")


class SlidingPool(RegionLayer):
    """Pooling layer over a tensor ``[B, C, *spatial]`` partitioned by ``P_x`` in any dims.

    A worker receives the cells of the tensor that its outputs read, and pads them itself.

    Args:
        takes_maximum: whether to take the maximum; otherwise the mean.
    """

    _dims: int

    def __init__(
        self,
        P_x: CartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None,
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        ceil_mode: bool,
        *,
        takes_maximum: bool,
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
        nested: bool | None,
    ) -> None:
        super().__init__()
        require_features(self._name, P_x, self._dims)
        self.P_x = P_x
        self.kernel_size, self.padding, self.dilation = kernel_size, padding, dilation
        self.stride = kernel_size if stride is None else stride
        self.ceil_mode = ceil_mode
        self._takes_maximum = takes_maximum
        self._kernel = per_dim(self._name, "kernel_size", kernel_size, self._dims)
        self._strides = per_dim(self._name, "stride", self.stride, self._dims)
        self._paddings = per_dim(self._name, "padding", padding, self._dims)
        self._dilations = per_dim(self._name, "dilation", dilation, self._dims)
        for d, (p, k) in enumerate(zip(self._paddings, self._kernel, strict=True)):
            if 2 * p > k:
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: padding {p} is more than half of the kernel {k}, "
                    "so that a window could contain only padding; pad less"
                )
        self._windows = self._make_windows()
        self.halo_exchange = HaloExchange(
            P_x, self._windows, nested=nested, global_shape=global_shape, shape=shape
        )
        self._agree_on(P_x, P_x.dim, global_shape, shape)

    def _make_windows(self) -> list[PoolWindow]:
        per_dim = zip(self._kernel, self._strides, self._dilations, self._paddings, strict=True)
        try:
            return [PoolWindow(k, s, d, (p, p), self.ceil_mode) for k, s, d, p in per_dim]
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None

    def forward(self, x: torch.Tensor) -> Any:
        return self.pool_block(*self.gather(x)) if self.P_x.active else x.clone()

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, PoolBlock]:
        """Return the cells that this worker's outputs read, and their place."""
        bound: _BoundPool = self._bindings(x, self._agree_and_bind)
        return x if bound.halo is None else move((bound.halo,), (x,))[0], bound.block

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> _BoundPool:
        inputs = layout.decomposition
        windows = [ComposedWindow((window,)) for window in self.windows]
        try:
            outputs = self.outputs_of(inputs).block(own_index(self.P_x))
            halo = self.halo_exchange.bind_to(inputs, layout.dtype, x, windows)
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None
        self.require_input(inputs)
        along = list(zip(windows, outputs.start, outputs.stop, inputs.shape, strict=True))[2:]
        reads = [window.reads(start, stop, extent)[0] for window, start, stop, extent in along]
        has_ghosts = not all(map(_owns_what_it_reads, inputs.dims, windows))
        return _BoundPool(halo if has_ghosts else None, self._block(reads, outputs.shape))

    def require_region(self) -> None:
        """Do nothing, because a region may contain any sliding pool."""

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        block = self._block(reads, shape)
        return lambda x: self.pool_block(x, block)

    def _block(self, reads: Sequence[Read], shape: Sequence[int]) -> PoolBlock:
        extents = tuple(read.extent for read in reads)
        if 0 in shape:
            reads = [Read(w.reach, (0, 1), (0, w.reach)) for w in self._windows]
        before = [read.overhang[0] for read in reads]
        # Torch's own padding, which is the same on both sides, never holds a maximum.
        front, behind = before, [max(0, read.overhang[1] - read.overhang[0]) for read in reads]
        lengths = [
            last - first + cells
            for (first, last), cells in zip([read.inside for read in reads], behind, strict=True)
        ]
        if self._dims == 3 and not self._takes_maximum and any(map(lt, lengths, self._kernel)):
            # Torch's mean rejects a block smaller than the kernel, even with padding.
            front, behind = [0, 0, 0], [read.overhang[1] for read in reads]
        pairs = [(p - q, last) for p, q, last in zip(before, front, behind, strict=True)]
        widths = tuple(cells for pair in reversed(pairs) for cells in pair)
        widths = widths if any(widths) else ()
        return PoolBlock(tuple(reads), tuple(shape), extents, tuple(front), widths)

    def require_input(self, inputs: Decomposition) -> None:
        """Raise for inputs that torch rejects, or for which it would read beyond the input."""
        refuse_empty(self._name, inputs)
        for d, (extent, window) in enumerate(zip(inputs.shape[2:], self._windows, strict=True)):
            if self._dims == 3 and not self._takes_maximum and extent < window.kernel:
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: the kernel {window.kernel} is larger than the "
                    f"global extent {extent}, which torch's layer rejects even with padding; use "
                    "a smaller kernel"
                )
            if self._takes_maximum and window.has_only_padding(extent):
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: a window of kernel {window.kernel} and dilation "
                    f"{window.dilation} over {extent} cells holds padding only; pad less"
                )

    def pool_block(self, x: torch.Tensor, block: PoolBlock) -> torch.Tensor:
        """Return the outputs of ``block`` for the cells ``x``; there may be no outputs."""
        if 0 not in block.shape:
            return self.pool(x, block)
        x = no_samples(x, [window.reach for window in self._windows])
        return self.pool(x, block).view(block.shape)

    def pool(self, x: torch.Tensor, block: PoolBlock) -> torch.Tensor:
        """Return the outputs of ``block`` for the cells ``x``, without padding."""
        raise NotImplementedError

    def maxima(self, x: torch.Tensor, block: PoolBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maxima, and their flat indices in the spatial dims of the padded cells."""
        least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        x, maximum = block.pad(x, least), MAXIMUM[self._dims]
        y, places = maximum(x, self._kernel, self._strides, block.front, self._dilations)
        return block.keep(y), block.keep(places)

    def means(
        self, x: torch.Tensor, block: PoolBlock, count_include_pad: bool = True
    ) -> torch.Tensor:
        """Return the means of the cells that count: never those beyond the global padding."""
        y = self.full_means(x, block)
        counted = [window.padding[0] if count_include_pad else 0 for window in self._windows]
        limits = [(-n, extent + n) for n, extent in zip(counted, block.extents, strict=True)]
        # All workers decide alike: a product is a second way for the gradient of a tangent.
        along = zip(self._windows, block.extents, limits, strict=True)
        if all(low <= -w.padding[0] and _end_of_last(w, n) <= high for w, n, (low, high) in along):
            return y
        counts = torch.ones((), dtype=y.dtype, device=y.device)
        for window, read, (low, high) in zip(self._windows, block.reads, limits, strict=True):
            first = torch.arange(*read.outputs, device=y.device) * window.stride - window.padding[0]
            cells = (first + window.kernel).clamp(max=high) - first.clamp(min=low)
            counts = counts.unsqueeze(-1) * cells.to(y.dtype)
        return y * (prod(self._kernel) / counts)

    def full_means(self, x: torch.Tensor, block: PoolBlock) -> torch.Tensor:
        """Return the means of the windows as if all their cells counted."""
        mean = MEAN[self._dims]
        return block.keep(mean(block.pad(x, 0.0), self._kernel, self._strides, block.front))


@dataclass(frozen=True)
class PoolBlock:
    """Outputs of one worker, and the padding of the cells that they read.

    Attributes:
        reads: ranges of outputs and of cells, one per spatial dim.
        shape: shape of the output block; may be empty.
        extents: global extents of the input, one per spatial dim.
        front: padding in front, one per spatial dim, which torch adds on both sides.
        widths: further padding, in the order of torch's ``pad``; empty if there is none.
    """

    reads: tuple[Read, ...]
    shape: tuple[int, ...]
    extents: tuple[int, ...]
    front: tuple[int, ...]
    widths: tuple[int, ...]

    def pad(self, x: torch.Tensor, value: float) -> torch.Tensor:
        """Return ``x`` with the further padding."""
        return F.pad(x, self.widths, value=value) if self.widths else x

    def keep(self, y: torch.Tensor) -> torch.Tensor:
        """Return these outputs, behind which torch's padding may have given others."""
        lengths = self.shape[2:] if 0 not in self.shape else (1,) * len(self.reads)
        return y if y.shape[2:] == lengths else y[(..., *map(slice, lengths))]

    def global_places(self, places: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Convert flat indices in cells of ``shape``, unpadded, to those in the global tensor."""
        behind = self.widths[::-2] or (0,) * len(shape)
        padded = [n + cells for n, cells in zip(shape, behind, strict=True)]
        pairs = zip(coordinates(places, padded), self.reads, strict=True)
        cells = [index + read.inside[0] for index, read in pairs]
        return flat_indices(cells, [read.extent for read in self.reads])


@dataclass(frozen=True)
class _BoundPool:
    """Movement and outputs of a layer, bound to one input shape.

    Attributes:
        halo: movement of the cells that each worker reads; ``None`` if all own what they read.
        block: this worker's outputs.
    """

    halo: Movement | None
    block: PoolBlock


def _end_of_last(window: PoolWindow, extent: int) -> int:
    return (window.output_extent(extent) - 1) * window.stride - window.padding[0] + window.kernel


def _owns_what_it_reads(inputs: Blocks, window: ComposedWindow) -> bool:
    # Torch pools a block from its first cell on.
    for index in range(inputs.parts):
        (first, last), (start, stop) = inputs.block(index), needed_range(inputs, window, index)
        if start < stop and not (first == start and stop <= last):
            return False
    return True
