"""Base class of max and average pools: windows that slide over a partitioned tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import is_eager, move
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.faces import axis_paddings
from gpudist.geometry.windows import HaloWidths, MaximumWindow, PoolWindow, Read
from gpudist.nn.partitions import require_features
from gpudist.nn.pool.block import PoolBlock
from gpudist.nn.pool.local import LocalPool
from gpudist.nn.pool.overlap import PoolingInPlace
from gpudist.nn.pool.with_ghosts import PoolingWithGhosts
from gpudist.nn.windowed.block_in_place import use_in_place
from gpudist.nn.windowed.region_layer import (
    BlockOperation,
    RegionLayer,
    WithPadding,
    padding_widths,
)
from gpudist.nn.windowed.window import per_dim
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import BindCache, own_index, placeholder_shape
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


@dataclass(frozen=True)
class _BoundSlidingPool:
    """Movement and local pooling of a layer, bound to one input shape.

    Attributes:
        halo: movement of the ghosts of each worker.
        block: pooling of the block with its ghosts.
        origin: global index of the first pooled cell, per spatial dim; negative in padding.
        has_ghosts: whether any worker reads cells of others, so that the input must be moved.
        in_place: pooling without a copy of the block; ``None`` if the block is copied.
        with_ghosts: pooling that does not keep the copy; ``None`` if autograd keeps it.
    """

    halo: Movement
    block: PoolBlock
    origin: tuple[int, ...]
    has_ghosts: bool = True
    in_place: PoolingInPlace | None = None
    with_ghosts: PoolingWithGhosts | None = None


def refuse_empty(name: str, inputs: Decomposition) -> None:
    """Raise for an input without channels or features, like torch."""
    for d, extent in enumerate(inputs.shape):
        if d > 0 and extent == 0:
            raise ShapeError(f"{name}, dim {d}: the input has no cells; only a batch may be empty")


class SlidingPool(RegionLayer):
    """Pooling layer over a tensor ``[B, C, *spatial]`` partitioned by ``P_x`` in any dims.

    Args:
        takes_maximum: whether to take the maximum; otherwise the mean.
        divisor: divisor of the sums; by default the number of cells in the window.
        count_include_pad: whether that number includes padding.
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
        divisor: int | None = None,
        count_include_pad: bool = True,
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
        overlap: bool,
        nested: bool | None,
    ) -> None:
        super().__init__()
        # The slab of a face includes corners, which a neighbour along one dim does not own.
        self.overlap = overlap and not nested
        require_features(self._name, P_x, self._dims)
        self.P_x = P_x
        self.kernel_size, self.padding, self.dilation = kernel_size, padding, dilation
        self.stride = kernel_size if stride is None else stride
        self._kernel = per_dim(self._name, "kernel_size", kernel_size, self._dims)
        self._strides = per_dim(self._name, "stride", self.stride, self._dims)
        self._paddings = per_dim(self._name, "padding", padding, self._dims)
        self._dilations = per_dim(self._name, "dilation", dilation, self._dims)
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad
        for d, (p, k) in enumerate(zip(self._paddings, self._kernel, strict=True)):
            if 2 * p > k:
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: padding {p} is more than half of the kernel {k}, "
                    "so that a window could contain only padding; pad less"
                )
        self._windows = self._make_windows()
        self._pool = LocalPool(
            takes_maximum, self._kernel, self._strides, self._dilations, ceil_mode, divisor
        )
        self.halo_exchange = HaloExchange(
            P_x,
            self._windows,
            padding_value=-torch.inf if takes_maximum else 0.0,
            nested=nested,
            global_shape=global_shape,
            shape=shape,
        )
        self._bindings = BindCache[_BoundSlidingPool](shape, self.halo_exchange.agreement)

    def _make_windows(self) -> list[PoolWindow]:
        per_dim = zip(self._kernel, self._strides, self._dilations, self._paddings, strict=True)
        try:
            return [PoolWindow(k, s, d, (p, p), self.ceil_mode) for k, s, d, p in per_dim]
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        bound = self._bindings(x, self._bind_pool)
        by_hand = bound.in_place or bound.with_ghosts
        if by_hand is not None and is_eager(x):
            return bound.block.scale(by_hand(x))
        return bound.block.scale(self._compose(bound, x)[0])

    def with_indices(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maxima, and their flat indices in the spatial dims of the global tensor."""
        if not self.P_x.active:
            return x.clone(), x.new_empty(placeholder_shape(x), dtype=torch.int64)
        bound = self._bindings(x, self._bind_pool)
        y, places = self._compose(bound, x)
        if places is None:
            return y, x.new_empty(bound.block.shape, dtype=torch.int64)
        pooled = bound.halo.output_shape if bound.has_ghosts else bound.halo.input_shape
        return y, bound.block.global_places(places, pooled[2:], bound.origin)

    def _compose(
        self, bound: _BoundSlidingPool, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return bound.block.apply(move((bound.halo,), (x,))[0] if bound.has_ghosts else x)

    def _bind_pool(self, x: torch.Tensor) -> _BoundSlidingPool:
        takes_maximum = self._pool.takes_maximum
        windows = [MaximumWindow(window) if takes_maximum else window for window in self._windows]
        try:
            layout = self.halo_exchange.agreement(x)
            inputs, read = layout.decomposition, (HaloWidths(), HaloWidths(), *windows)
            halo = self.halo_exchange.bind_to(inputs, layout.dtype, x, read)
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None
        self.require_input(inputs)
        index = own_index(self.P_x)
        outputs = self.outputs_of(inputs).block(index)
        block = self._block(outputs.shape, inputs.shape[2:], outputs.start[2:])
        first = block.first_cells(block.outputs)
        if takes_maximum:
            padding = block.margin_before(block.outputs)
            block = replace(block, padding=padding, holds_padding=False)
            first = tuple(max(0, cell) for cell in first)
        bound = _BoundSlidingPool(halo, block, first)
        if takes_maximum and self._are_exact(inputs):
            with_ghosts = PoolingWithGhosts(halo, block, lambda x: self._compose(bound, x)[0])
            bound = replace(bound, with_ghosts=with_ghosts)
        use = use_in_place(self.halo_exchange, layout, x, self.overlap, with_own=True)
        if use is None:
            return bound
        are_whole = self._torch_pools_every_block(inputs)
        if not use.faces and (are_whole or not self._pool.needs_whole_kernels):
            block = replace(block, padding=use.padding, holds_padding=False)
            owned = inputs.block(index).start[2:]
            return _BoundSlidingPool(halo, block, owned, has_ghosts=False)
        if not use.faces or not are_whole:
            return bound
        in_place = PoolingInPlace(
            self._pool,
            use.faces,
            use.outputs,
            tuple(_margin_of(block, cells) for cells in use.outputs),
            use.padding,
            lambda x: self._compose(bound, x)[0],
        )
        return replace(bound, in_place=in_place)

    def _block(
        self, shape: Sequence[int], extents: Sequence[int], outputs: Sequence[int]
    ) -> PoolBlock:
        return PoolBlock(
            self._pool,
            tuple(self._windows),
            self.count_include_pad,
            tuple(shape),
            tuple(extents),
            tuple(outputs),
            padding=(0,) * self._dims,
        )

    def require_region(self) -> None:
        """Do nothing, because a region may contain any sliding pool."""

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        extents, outputs = zip(*((read.extent, read.outputs[0]) for read in reads), strict=True)
        block = self._block(shape, extents, outputs)
        return WithPadding(block, padding_widths(reads), self.halo_exchange.padding_value)

    def require_input(self, inputs: Decomposition) -> None:
        """Raise for inputs that torch rejects, or for which it would read beyond the input."""
        refuse_empty(self._name, inputs)
        extents = inputs.shape[2:]
        for d, (extent, window) in enumerate(zip(extents, self._windows, strict=True)):
            if self._pool.needs_whole_kernels and extent < window.kernel:
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: the kernel {window.kernel} is larger than the "
                    f"global extent {extent}, which torch's layer rejects even with padding; use "
                    "a smaller kernel"
                )
            if self._pool.takes_maximum and window.has_only_padding(extent):
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: a window of kernel {window.kernel} and dilation "
                    f"{window.dilation} over {extent} cells holds padding only; pad less"
                )

    def _are_exact(self, inputs: Decomposition) -> bool:
        """Return whether no worker pools cells for outputs of another one."""
        for blocks, window in zip(inputs.dims[2:], self._windows, strict=True):
            read, outputs = MaximumWindow(window), window.outputs(blocks)
            for index in range(outputs.occupied):
                start, stop = outputs.block(index)
                low, high = read.needed(start, stop, blocks.extent)
                padding = (read.padding_of(start),) * 2
                pooled = replace(window, padding=padding)
                if start < stop and pooled.output_extent(high - low) > stop - start:
                    return False
        return True

    def _torch_pools_every_block(self, inputs: Decomposition) -> bool:
        for blocks, window in zip(inputs.dims[2:], self._windows, strict=True):
            smallest = min(blocks.lengths)
            most_padding = max(axis_paddings(blocks, window) or (0,))
            if smallest < window.kernel or 2 * most_padding > window.kernel:
                return False
        return True


def _margin_of(block: PoolBlock, cells: Sequence[slice]) -> tuple[int, ...]:
    starts = zip(block.outputs, cells[2:], strict=True)
    return block.margin_before([start + part.start for start, part in starts])
