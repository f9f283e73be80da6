"""Distributed max and average pooling over any partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from gpudist.autograd import is_eager, move
from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.faces import axis_paddings
from gpudist.geometry.windows import SlidingWindow
from gpudist.nn.in_place import use_in_place
from gpudist.nn.parameter import tied_empty
from gpudist.nn.pool_overlap import LocalPool, PoolingInPlace
from gpudist.nn.window import per_dim
from gpudist.ops.agreement import Layout, ShapeMode
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import Bound
from gpudist.partition import CartesianPartition

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True)
class _Bound:
    """What a layer remembers of one shape of its input.

    Attributes:
        layout, halo: of the input, and the movement that gives each worker its ghosts.
        padding: on both sides of what is pooled.
        has_ghosts: some worker reads cells of others, so that the input moves.
        in_place: the pooling without a copy of the block, where it is to be used.
    """

    layout: Layout
    halo: Movement
    padding: tuple[int, ...]
    has_ghosts: bool = True
    in_place: PoolingInPlace | None = None


class _DistributedPool(torch.nn.Module):
    """A pooling layer over a tensor ``[B, C, *spatial]`` cut over ``P_x`` in any dims."""

    _dims: int
    _takes_maximum: bool

    def __init__(
        self,
        P_x: CartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None,
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        ceil_mode: bool,
        padding_value: float,
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
        overlap: bool,
    ) -> None:
        super().__init__()
        self.overlap = overlap
        name = type(self).__name__
        if P_x.dim != self._dims + 2:
            raise PartitionError(
                f"{name}: P_x has shape {list(P_x.shape)} but needs {self._dims + 2} axes: batch, "
                f"channels and {self._dims} of features"
            )
        if ceil_mode:
            raise ShapeError(f"{name}: ceil_mode is not supported; pad the input instead")
        self.P_x = P_x
        self.kernel_size = per_dim(name, "kernel_size", kernel_size, self._dims)
        strides = self.kernel_size if stride is None else stride
        self.stride = per_dim(name, "stride", strides, self._dims)
        self.padding = per_dim(name, "padding", padding, self._dims)
        self.dilation = per_dim(name, "dilation", dilation, self._dims)
        for d, (p, k) in enumerate(zip(self.padding, self.kernel_size, strict=True)):
            if 2 * p > k:
                raise ShapeError(
                    f"{name}, dim {d + 2}: padding {p} is more than half of the kernel {k}, so "
                    "that a window could hold padding only"
                )
        self.halo_exchange = HaloExchange(
            P_x,
            [
                SlidingWindow(k, s, d, (p, p))
                for k, s, d, p in zip(
                    self.kernel_size, self.stride, self.dilation, self.padding, strict=True
                )
            ],
            padding_value=padding_value,
            global_shape=global_shape,
            shape=shape,
        )

        self._bound = Bound[_Bound](shape, self.halo_exchange.agreement)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        bound = self._bound(x, self._bind)
        if bound.in_place is not None and is_eager():
            return self._scale(bound.in_place(x), bound.layout)
        output_shape = tuple(stop - start for start, stop in self._outputs(bound.layout))
        if 0 in output_shape:
            block = move((bound.halo,), (x,))[0] if bound.has_ghosts else x
            # Torch's pools have a gradient that counts as depending on the input: so must this one.
            return tied_empty(output_shape, block.dtype, block, block)
        return self._scale(self._compose(bound, x), bound.layout)

    def _compose(self, bound: _Bound, x: torch.Tensor) -> torch.Tensor:
        """Move, then pool: a composition of differentiable operators."""
        block = move((bound.halo,), (x,))[0] if bound.has_ghosts else x
        return self._pool(block, bound.padding)

    def _bind(self, x: torch.Tensor) -> _Bound:
        layout, halo = self.halo_exchange.bound(x)
        bound = _Bound(layout, halo, (0,) * self._dims)
        use = use_in_place(self.halo_exchange, layout, x, self.overlap, with_own=True)
        if use is None:
            return bound
        if not use.faces:
            return replace(bound, padding=use.padding, has_ghosts=False)
        if not self._torch_pools_every_block(layout):
            return bound
        pool = LocalPool(self._takes_maximum, self.kernel_size, self.stride, self.dilation)
        compose = partial(self._compose, bound)
        in_place = PoolingInPlace(pool, use.faces, use.outputs, use.padding, compose)
        return replace(bound, in_place=in_place)

    def _torch_pools_every_block(self, layout: Layout) -> bool:
        """Whether blocks are as large as the kernel, and padded by at most half of it."""
        axes = zip(layout.decomposition.dims[2:], self.halo_exchange.windows[2:], strict=True)
        for blocks, window in axes:
            assert isinstance(window, SlidingWindow)
            smallest = min(blocks.length(i) for i in range(blocks.parts))
            most_padding = max(axis_paddings(blocks, window) or (0,))
            if smallest < window.kernel or 2 * most_padding > window.kernel:
                return False
        return True

    def _outputs(self, layout: Layout) -> list[tuple[int, int]]:
        """This worker's range of global outputs, per dim."""
        assert self.P_x.index is not None
        return [
            window.outputs(blocks).block(i)
            for blocks, window, i in zip(
                layout.decomposition.dims, self.halo_exchange.windows, self.P_x.index, strict=True
            )
        ]

    def _pool(self, block: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
        raise NotImplementedError

    def _scale(self, y: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The output, of the windows' maxima, or means in which padding counts."""
        return y

    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, "
            f"P_x={list(self.P_x.shape)}"
        )


class _DistributedMaxPool(_DistributedPool):
    """Maximum over sliding windows of a tensor ``[B, C, *spatial]`` cut over ``P_x`` in any dims.

    Output blocks are balanced. Ties give the gradient to the same cell as in the torch layer.

    Args:
        P_x: owns the input and the output.
        kernel_size, stride, padding, dilation: in cells, as torch's layer; the stride is the kernel
            size unless given.
        return_indices, ceil_mode: not supported.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        overlap: pool the own block in place and its boundary apart, where that is possible and
            pays, by the rule of the convolution; ``False`` refuses.

    Cost:
        One halo exchange, which copies the block unless it is pooled in place; neither where no
        window crosses blocks.

    Raises:
        PartitionError, ShapeError: at construction, for what is not supported.
    """

    _takes_maximum = True

    def __init__(
        self,
        P_x: CartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        overlap: bool = True,
    ) -> None:
        super().__init__(
            P_x, kernel_size, stride, padding, dilation, ceil_mode, -torch.inf,
            global_shape, shape, overlap,
        )  # fmt: skip
        if return_indices:
            raise ShapeError(f"{type(self).__name__}: return_indices is not supported")

    def _pool(self, block: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
        return _MAX[self._dims](block, self.kernel_size, self.stride, padding, self.dilation)


class _DistributedAvgPool(_DistributedPool):
    """Mean over sliding windows of a tensor ``[B, C, *spatial]`` cut over ``P_x`` in any dims.

    Output blocks are balanced.

    Args:
        P_x: owns the input and the output.
        kernel_size, stride, padding: in cells, as torch's layer; the stride is the kernel size
            unless given.
        ceil_mode: not supported.
        count_include_pad: whether padding counts in the mean.
        divisor_override: divide by this instead of the number of cells.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        overlap: pool the own block in place and its boundary apart, where that is possible and
            pays, by the rule of the convolution; ``False`` refuses.

    Cost:
        One halo exchange, which copies the block unless it is pooled in place; neither where no
        window crosses blocks.

    Raises:
        PartitionError, ShapeError: at construction, for what is not supported.
    """

    _takes_maximum = False

    def __init__(
        self,
        P_x: CartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        overlap: bool = True,
    ) -> None:
        super().__init__(
            P_x, kernel_size, stride, padding, 1, ceil_mode, 0.0, global_shape, shape, overlap
        )
        if divisor_override is not None and divisor_override <= 0:
            raise ShapeError(
                f"{type(self).__name__}: divisor_override is {divisor_override} but must be "
                "positive"
            )
        self.count_include_pad = count_include_pad
        self.divisor_override = divisor_override

    def _pool(self, block: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
        return _AVERAGE[self._dims](block, self.kernel_size, self.stride, padding)

    def _scale(self, y: torch.Tensor, layout: Layout) -> torch.Tensor:
        cells = 1
        for k in self.kernel_size:
            cells *= k
        if self.divisor_override is not None:
            return y * (cells / self.divisor_override)
        if self.count_include_pad or not any(self.padding):
            return y
        counts = torch.ones((), dtype=y.dtype, device=y.device)
        for d, (start, stop) in enumerate(self._outputs(layout)[2:]):
            extent = layout.decomposition.shape[d + 2]
            first = torch.arange(start, stop, device=y.device) * self.stride[d] - self.padding[d]
            inside = (first + self.kernel_size[d]).clamp(max=extent) - first.clamp(min=0)
            counts = counts.unsqueeze(-1) * inside.to(y.dtype)
        return y * (cells / counts)


class DistributedMaxPool1d(_DistributedMaxPool):
    __doc__ = _DistributedMaxPool.__doc__
    _dims = 1


class DistributedMaxPool2d(_DistributedMaxPool):
    __doc__ = _DistributedMaxPool.__doc__
    _dims = 2


class DistributedMaxPool3d(_DistributedMaxPool):
    __doc__ = _DistributedMaxPool.__doc__
    _dims = 3


class DistributedAvgPool1d(_DistributedAvgPool):
    __doc__ = _DistributedAvgPool.__doc__
    _dims = 1


class DistributedAvgPool2d(_DistributedAvgPool):
    __doc__ = _DistributedAvgPool.__doc__
    _dims = 2


class DistributedAvgPool3d(_DistributedAvgPool):
    __doc__ = _DistributedAvgPool.__doc__
    _dims = 3
