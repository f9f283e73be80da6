"""What max and average pools share: windows that slide over a tensor cut in any dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from gpudist.autograd import is_eager, move
from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.faces import axis_paddings
from gpudist.geometry.pooling import PoolWindow
from gpudist.nn.in_place import use_in_place
from gpudist.nn.local_pool import (
    LocalPool,
    behind_margin,
    coordinates,
    flattened,
    no_samples,
    taken,
)
from gpudist.nn.pool_overlap import PoolingInPlace
from gpudist.nn.window import per_dim
from gpudist.ops.agreement import Layout, ShapeMode
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import Bound, placeholder_shape
from gpudist.partition import CartesianPartition


@dataclass(frozen=True)
class _Bound:
    """What a layer remembers of one shape of its input.

    Attributes:
        layout, halo: of the input, and the movement that gives each worker its ghosts.
        outputs: this worker's range of global outputs, per dim.
        origin: global indices of the first cell of what is pooled, per spatial dim; negative in the
            padding.
        padding: on both sides of what is pooled.
        has_ghosts: some worker reads cells of others, so that the input moves.
        in_place: the pooling without a copy of the block, where it is to be used.
    """

    layout: Layout
    halo: Movement
    outputs: tuple[tuple[int, int], ...]
    origin: tuple[int, ...]
    padding: tuple[int, ...]
    has_ghosts: bool = True
    in_place: PoolingInPlace | None = None

    @property
    def output_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.outputs)

    @property
    def margin(self) -> tuple[int, ...]:
        """Cells of padding in front, in the tensor that is pooled."""
        return tuple(max(0, -start) for start in self.origin)


def refuse_empty(name: str, layout: Layout) -> None:
    """Refuse an input without channels or features, as torch does."""
    for d, extent in enumerate(layout.decomposition.shape):
        if d > 0 and extent == 0:
            raise ShapeError(f"{name}, dim {d}: the input has no cells; only a batch may be empty")


class SlidingPool(torch.nn.Module):
    """A pooling layer over a tensor ``[B, C, *spatial]`` cut over ``P_x`` in any dims.

    Args:
        takes_maximum: or else the mean.
        divisor: of the sums, where that is not the number of cells in the window.
        count_include_pad: whether padding is among these.
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
        nested: bool,
    ) -> None:
        super().__init__()
        # A slab of a face holds corners, which its neighbour along one dim does not have.
        self.overlap = overlap and not nested
        self._name = name = type(self).__name__
        if P_x.dim != self._dims + 2:
            raise PartitionError(
                f"{name}: P_x has shape {list(P_x.shape)} but needs {self._dims + 2} axes: batch, "
                f"channels and {self._dims} of features"
            )
        self.P_x = P_x
        self.kernel_size = per_dim(name, "kernel_size", kernel_size, self._dims)
        strides = self.kernel_size if stride is None else stride
        self.stride = per_dim(name, "stride", strides, self._dims)
        self.padding = per_dim(name, "padding", padding, self._dims)
        self.dilation = per_dim(name, "dilation", dilation, self._dims)
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad
        for d, (p, k) in enumerate(zip(self.padding, self.kernel_size, strict=True)):
            if 2 * p > k:
                raise ShapeError(
                    f"{name}, dim {d + 2}: padding {p} is more than half of the kernel {k}, so "
                    "that a window could hold padding only"
                )
        self._windows = self._make_windows()
        self._pool = LocalPool(
            takes_maximum, self.kernel_size, self.stride, self.dilation, ceil_mode, divisor
        )
        self.halo_exchange = HaloExchange(
            P_x,
            self._windows,
            padding_value=-torch.inf if takes_maximum else 0.0,
            nested=nested,
            global_shape=global_shape,
            shape=shape,
        )
        self._bound = Bound[_Bound](shape, self.halo_exchange.agreement)

    def _make_windows(self) -> list[PoolWindow]:
        per_dim = zip(self.kernel_size, self.stride, self.dilation, self.padding, strict=True)
        try:
            return [PoolWindow(k, s, d, (p, p), self.ceil_mode) for k, s, d, p in per_dim]
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        bound = self._bound(x, self._bind)
        if bound.in_place is not None and is_eager():
            return self._scale(bound.in_place(x), bound)
        return self._scale(self._compose(bound, x)[0], bound)

    def with_indices(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The maxima, and their flat indices in the spatial dims of the global tensor."""
        if not self.P_x.active:
            return x.clone(), x.new_empty(placeholder_shape(x), dtype=torch.int64)
        bound = self._bound(x, self._bind)
        y, places = self._compose(bound, x)
        if places is None:
            return y, x.new_empty(bound.output_shape, dtype=torch.int64)
        pooled = self._pooled_shape(bound)
        cells = zip(coordinates(places, pooled), bound.origin, strict=True)
        return y, flattened([c + start for c, start in cells], bound.layout.decomposition.shape[2:])

    def _compose(self, bound: _Bound, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Move, then pool: a composition of differentiable operators. Also where the maxima are."""
        block = move((bound.halo,), (x,))[0] if bound.has_ghosts else x
        may_hold_padding = bound.has_ghosts and self._pool.takes_maximum and any(self.padding)
        if 0 in bound.output_shape:
            y, _ = self._pool_block(no_samples(block, self._reach), bound, may_hold_padding)
            return y.view(bound.output_shape), None
        return self._pool_block(block, bound, may_hold_padding)

    def _pool_block(
        self, block: torch.Tensor, bound: _Bound, may_hold_padding: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not may_hold_padding:
            return self._pool.forward(block, bound.padding)
        _, places = self._pool.maxima(block.detach(), bound.padding)
        places = behind_margin(places, block.shape[2:], bound.margin, self.dilation)
        return taken(block, places), places

    @property
    def _reach(self) -> list[int]:
        return [window.reach for window in self._windows]

    def _pooled_shape(self, bound: _Bound) -> tuple[int, ...]:
        shape = bound.halo.output_shape if bound.has_ghosts else bound.halo.input_shape
        return shape[2:]

    def _bind(self, x: torch.Tensor) -> _Bound:
        try:
            layout, halo = self.halo_exchange.bound(x)
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None
        self._refuse_shape(layout)
        bound = _Bound(layout, halo, self._outputs(layout), self._needed(layout), (0,) * self._dims)
        use = use_in_place(self.halo_exchange, layout, x, self.overlap, with_own=True)
        if use is None:
            return bound
        are_whole = self._torch_pools_every_block(layout)
        if not use.faces and (are_whole or not self._pool.needs_whole_kernels):
            return replace(bound, origin=self._owned(layout), padding=use.padding, has_ghosts=False)
        if not use.faces or not are_whole:
            return bound
        in_place = PoolingInPlace(
            self._pool,
            use.faces,
            use.outputs,
            tuple(self._margin_of(layout, cells) for cells in use.outputs),
            use.padding,
            lambda x: self._compose(bound, x)[0],
        )
        return replace(bound, in_place=in_place)

    def _refuse_shape(self, layout: Layout) -> None:
        """Refuse what torch refuses, or reads beyond its input for."""
        refuse_empty(self._name, layout)
        extents = layout.decomposition.shape[2:]
        for d, (extent, window) in enumerate(zip(extents, self._windows, strict=True)):
            if self._pool.needs_whole_kernels and extent < window.kernel:
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: the kernel {window.kernel} is larger than the "
                    f"global extent {extent}, which torch's layer refuses even if it is padded"
                )
            if self._pool.takes_maximum and window.has_only_padding(extent):
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: a window of kernel {window.kernel} and dilation "
                    f"{window.dilation} over {extent} cells holds padding only; pad less"
                )

    def _torch_pools_every_block(self, layout: Layout) -> bool:
        """Whether blocks are as large as the kernel, and padded by at most half of it."""
        for blocks, window in zip(layout.decomposition.dims[2:], self._windows, strict=True):
            smallest = min(blocks.length(i) for i in range(blocks.parts))
            most_padding = max(axis_paddings(blocks, window) or (0,))
            if smallest < window.kernel or 2 * most_padding > window.kernel:
                return False
        return True

    def _outputs(self, layout: Layout) -> tuple[tuple[int, int], ...]:
        assert self.P_x.index is not None
        return tuple(
            window.outputs(blocks).block(i)
            for blocks, window, i in zip(
                layout.decomposition.dims, self.halo_exchange.windows, self.P_x.index, strict=True
            )
        )

    def _owned(self, layout: Layout) -> tuple[int, ...]:
        assert self.P_x.index is not None
        return layout.decomposition.block(self.P_x.index).start[2:]

    def _needed(self, layout: Layout) -> tuple[int, ...]:
        return self._first_cells([start for start, _ in self._outputs(layout)[2:]])

    def _margin_of(self, layout: Layout, cells: Sequence[slice]) -> tuple[int, ...]:
        """Cells of padding in front of what some of this worker's outputs read."""
        starts = [start for start, _ in self._outputs(layout)[2:]]
        firsts = [start + part.start for start, part in zip(starts, cells[2:], strict=True)]
        return tuple(max(0, -first) for first in self._first_cells(firsts))

    def _first_cells(self, outputs: Sequence[int]) -> tuple[int, ...]:
        per_dim = zip(outputs, self.stride, self.padding, strict=True)
        return tuple(output * s - p for output, s, p in per_dim)

    def _scale(self, y: torch.Tensor, bound: _Bound) -> torch.Tensor:
        """The output, of the windows' maxima, or means over all cells of the kernel."""
        if self._pool.takes_maximum or self._pool.divisor is not None:
            return y
        extents = bound.layout.decomposition.shape[2:]
        are_cut = any(w.cuts(n) for w, n in zip(self._windows, extents, strict=True))
        if not are_cut and (self.count_include_pad or not any(self.padding)):
            return y
        counts = torch.ones((), dtype=y.dtype, device=y.device)
        for d, (start, stop) in enumerate(bound.outputs[2:]):
            counted = self.padding[d] if self.count_include_pad else 0
            first = torch.arange(start, stop, device=y.device) * self.stride[d] - self.padding[d]
            last = (first + self.kernel_size[d]).clamp(max=extents[d] + counted)
            counts = counts.unsqueeze(-1) * (last - first.clamp(min=-counted)).to(y.dtype)
        return y * (prod(self.kernel_size) / counts)

    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"P_x={list(self.P_x.shape)}"
        )
