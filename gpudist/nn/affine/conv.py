"""Distributed convolution over any partition of batch, channels and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, overload

import torch

from gpudist.errors import ShapeError
from gpudist.exchange.autograd import apply_handwritten, is_eager
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.halo import own_paddings, owns_what_it_reads
from gpudist.geometry.windows import (
    ComposedWindow,
    FoldedWindow,
    PaddedWindow,
    Read,
    SlidingWindow,
    Window,
)
from gpudist.nn.affine.affine_layer import BoundAffine
from gpudist.nn.affine.conv_arguments import (
    PADDING_MODES,
    Paddings,
    conv_windows,
    paddings_of,
    require_groups,
    require_padding_mode,
)
from gpudist.nn.affine.conv_block import BlockConvolution
from gpudist.nn.affine.conv_channels import (
    bind_haloed_broadcast,
    output_shapes,
    require_input_channels,
)
from gpudist.nn.affine.conv_layer import ConvLayer
from gpudist.nn.affine.conv_with_ghosts import ConvolutionWithGhosts, bind_with_ghosts
from gpudist.nn.autocast import autocast_is_on, product_dtype
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import partitions_lead
from gpudist.nn.windowed.edge_padding import Pad, bind_edge_padding, require_padding_of_input
from gpudist.nn.windowed.region_layer import BlockOperation, WithPadding, padding_widths
from gpudist.nn.windowed.window import per_dim
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedConv(ConvLayer):
    """Convolution of a tensor ``[B, C, *spatial]`` partitioned over a Cartesian grid of workers.

    With ``P_x`` alone, batch and features may be split: ``P_x`` has shape ``[batch, 1, *spatial]``.
    With ``P_x, P_y, P_w`` of shapes ``[1, ci, *spatial]``, ``[1, co, *spatial]`` and ``[co, ci,
    *spatial]``, channels are split too. With ``groups > 1``, split channels must be block-diagonal:
    every block holds whole groups, ``co == ci`` and ``P_w`` has shape ``[co, 1, *spatial]``. In
    that case ``P_x`` alone is enough.

    The workers of ``P_w`` at spatial index 0 own the blocks of the weight, and those also at input
    channel index 0 own the blocks of the bias. With ``P_x`` alone, its rank 0 owns both. All other
    workers hold zero-volume parameters. Initial values equal those of the torch layer under the
    same seed. Output blocks are balanced. With ``P_x`` alone, the output has the
    ``torch.channels_last`` format of the input if torch's convolution preserves it on that device.

    Args:
        P_x: partition of the input.
        P_y, P_w: partitions of the output and of the weight; optional. Pass both, by name or
            directly after ``P_x``.
        in_channels ... dtype: as in the torch layer; sizes are global.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        nested: exchange ghosts dim by dim, with two neighbours each, instead of with all neighbours
            at once; ``None``: see :func:`~gpudist.halo_exchange`. Results are identical.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it.
            Forward then moves no parameters, and backward sums the gradients over the copies;
            :func:`~gpudist.nn.fuse_parameter_movements` sums those of several layers together.

    Cost:
        In forward, one group of messages carries the ghost cells of the input and the parameters
        from their owners; with split channels, a broadcast of the input and a sum-reduce of the
        output follow. Backward moves the same bytes in the opposite direction. The block is copied
        next to its ghosts, unless no worker needs ghosts. The copy has no zeros that the worker
        would have on both sides of a dim. Backward keeps it; on a GPU, with ``P_x`` alone and from
        4 MiB on, it keeps the block and the ghosts, and copies again for the gradient of the
        weight.
        Workers at an edge copy the block once more if the padding is reflected or replicated.

    Raises:
        PartitionError: the partitions do not match.
        ShapeError: an argument is not supported, or there are more blocks than channels. At the
            first call, on every rank alike, if a kernel or padding does not fit the input.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 4.
    """

    _padding_modes: Sequence[str] = PADDING_MODES

    @overload
    def __init__(
        self, P_x: CartesianPartition, in_channels: int, out_channels: int,
        kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | Literal["same", "valid"] = 0,
        dilation: int | Sequence[int] = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, P_y: CartesianPartition | None = None,
        P_w: CartesianPartition | None = None, global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static", nested: bool | None = False,
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, P_x: CartesianPartition, P_y: CartesianPartition, P_w: CartesianPartition,
        in_channels: int, out_channels: int, kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | Literal["same", "valid"] = 0,
        dilation: int | Sequence[int] = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static", nested: bool | None = False,
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @partitions_lead
    def __init__(
        self, P_x: CartesianPartition, in_channels: int, out_channels: int,
        kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | Literal["same", "valid"] = 0,
        dilation: int | Sequence[int] = 1, groups: int = 1, bias: bool = True,
        padding_mode: str = "zeros", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, *, P_y: CartesianPartition | None = None,
        P_w: CartesianPartition | None = None, global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static", nested: bool | None = False,
        replicate_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        require_padding_mode(self._name, padding_mode, self._padding_modes)
        require_groups(self._name, in_channels, out_channels, groups)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = per_dim(self._name, "kernel_size", kernel_size, self._dims)
        self.stride = per_dim(self._name, "stride", stride, self._dims)
        self.dilation = per_dim(self._name, "dilation", dilation, self._dims)
        self._paddings = self._paddings_of(padding)
        self.padding: str | tuple[int, ...] = (
            padding
            if isinstance(padding, str)
            else per_dim(self._name, "padding", padding, self._dims)
        )
        self.output_padding = (0,) * self._dims
        self.padding_mode = padding_mode
        self._place_channels(P_x, P_y, P_w, global_shape, shape)
        self.halo_exchange = HaloExchange(
            self.P_x,
            conv_windows(
                self.kernel_size, self.stride, self.dilation, self._paddings, padding_mode
            ),
            periodic=padding_mode == "circular",
            nested=nested,
        )
        weight_shape = (out_channels, in_channels // groups, *self.kernel_size)
        self._make_parameters(weight_shape, bias, device, dtype, replicate_parameters)

    def _paddings_of(self, padding: int | Sequence[int] | Literal["same", "valid"]) -> Paddings:
        return paddings_of(self._name, padding, self.kernel_size, self.stride, self.dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._placement.P_all.active:
            return x.clone()
        x = self.cast(x)
        bound: _BoundConv = self._bindings(x, self._agree_and_bind, self.way_of(x))
        weight, bias = [*self.own_parameters(), None][:2]
        return self.convolve(bound, x, weight, bias)

    def convolve(
        self, bound: _BoundConv, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        by_hand = bound.by_hand(x)
        if by_hand is None:
            return self.affine(bound, x, weight, bias)
        if autocast_is_on(x.device):
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return apply_handwritten(by_hand, x, weight, bias)

    def _compute(
        self,
        bound: _BoundConv,
        x: torch.Tensor,
        block: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if bound.edge_padding is not None:
            block = bound.edge_padding(block)
        assert bound.block is not None
        return bound.block(in_form(block, channels_last_form(x)), weight, bias)

    def bind(self, layout: BlockLayout, x: torch.Tensor, *output_size: int) -> _BoundConv:
        """Bind the movements and the local convolution to an agreed input layout."""
        inputs = layout.decomposition
        self.require_input(inputs)
        try:
            read = self._windows_of_blocks()
            movement = self.halo_exchange.bind_to(inputs, layout.dtype, x, read)
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None
        if self._placement.P_source is not None:
            haloed = (self._placement, layout, self.halo_exchange, movement, x)
            movement = movement.then(bind_haloed_broadcast(*haloed))
        windows = self.windows
        shape_of = output_shapes(self._placement, inputs, windows, self.out_channels)
        key = (self._name, inputs, windows, self.out_channels)
        placeholder = movement.output_shape, movement.output_dtype
        reduction = self._placement.bind_sum(shape_of, key, layout.dtype, placeholder, x)
        index = self._placement.P_c.index
        block = None
        if index is not None:
            block = self._block(shape_of(index), _paddings(read, inputs, index))
        features = block.shape[1] if block is not None else None
        bound = _BoundConv(movement, self.bind_parameters(), reduction, features, block)
        if any(isinstance(window, FoldedWindow) for window in windows):
            return self._with_edge_padding(bound, layout, x)
        if self._placement.P_source is not None or index is None or block is None:
            return bound
        padding = own_paddings(inputs, windows, index)
        if padding is not None and not self._have_ghosts(inputs):
            return replace(bound, halo=None, block=replace(block, padding=padding))
        if reduction is None and 0 not in block.shape and not self._is_on_cpu(x):
            given = bound.parameters, block.convolution, partial(self.affine, bound)
            with_ghosts = bind_with_ghosts(movement, inputs, read, index, *given)
            bound = replace(bound, with_ghosts=with_ghosts)
        return bound

    def _windows_of_blocks(self) -> list[Window]:
        """Return the windows of the cells that are moved: the local convolution adds the rest."""
        halo = self.halo_exchange.halo
        if self._placement.P_source is not None:
            return list(halo.windows)
        return [
            PaddedWindow(window) if isinstance(window, SlidingWindow) and not wraps else window
            for window, wraps in zip(halo.windows, halo.periodic, strict=True)
        ]

    def _with_edge_padding(
        self, bound: _BoundConv, layout: BlockLayout, x: torch.Tensor
    ) -> _BoundConv:
        """Add to ``bound`` the padding by copies of cells, which follows the halo exchange."""
        windows, P_c = self.halo_exchange.halo.windows, self._placement.P_c
        if self._placement.P_source is None and not self._have_ghosts(layout.decomposition):
            bound = replace(bound, halo=None)
        if P_c.index is None or bound.block is None or 0 in bound.block.shape:
            return bound
        moved = None if bound.halo is None else bound.halo.output_shape
        edge_padding = bind_edge_padding(self._name, layout, windows, P_c, x, moved)
        return replace(bound, edge_padding=edge_padding)

    def _have_ghosts(self, inputs: Decomposition) -> bool:
        halo = self.halo_exchange.halo
        inside = [
            window if wraps else ComposedWindow((window,))
            for window, wraps in zip(halo.windows, halo.periodic, strict=True)
        ]
        return not all(map(owns_what_it_reads, inputs.dims, inside))

    def _is_on_cpu(self, x: torch.Tensor) -> bool:
        # A block without data stands for one on the device of the planned world.
        return suits_cpu(x) or (x.is_meta and not self.P_x.wire.has_streams)

    def _block(
        self, shape: Sequence[int], padding: tuple[int, ...] | None = None
    ) -> BlockConvolution:
        padding = padding or (0,) * self._dims
        groups = self._groups_of_block()
        return BlockConvolution(tuple(shape), self.stride, self.dilation, groups, padding)

    def require_region(self) -> None:
        if self.padding_mode != "zeros":
            raise ShapeError(
                f"{self._name}: padding_mode {self.padding_mode!r} is not supported in a "
                "HaloRegion, where cells beyond the edge are constant; use 'zeros'"
            )
        super().require_region()

    def require_input(self, inputs: Decomposition) -> None:
        require_input_channels(self._name, inputs, self.in_channels)
        require_padding_of_input(self._name, self.padding_mode, self._paddings, inputs.shape[2:])

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        if all(front == behind for front, behind in (read.overhang for read in reads)):
            return self._block(shape, tuple(read.overhang[0] for read in reads))
        return WithPadding(self._block(shape), padding_widths(reads))


def _paddings(
    windows: Sequence[Window], inputs: Decomposition, index: Sequence[int]
) -> tuple[int, ...]:
    """Return the zeros that the convolution of a worker adds on both sides, per spatial dim."""
    dims = zip(windows[2:], inputs.dims[2:], index[2:], strict=True)
    return tuple(
        w.padding_of(*w.outputs(blocks).block(i), blocks.extent)
        if isinstance(w, PaddedWindow)
        else 0
        for w, blocks, i in dims
    )


@dataclass(frozen=True)
class _BoundConv(BoundAffine):
    """Movements and local convolution of a layer, bound to one input shape.

    Attributes:
        block: local convolution; ``None`` on workers that do not convolve.
        with_ghosts: convolution that keeps the ghosts alone; ``None`` if the copy is kept.
        edge_padding: padding of the block and its ghosts before the convolution.
    """

    block: BlockConvolution | None = None
    with_ghosts: ConvolutionWithGhosts | None = None
    edge_padding: Pad | None = None

    def by_hand(self, x: torch.Tensor) -> ConvolutionWithGhosts | None:
        """Return the convolution with a backward of its own, if it suits ``x``.

        Under autocast, the block must have the dtype of the product, and no parameter may move.
        """
        if self.with_ghosts is None or not torch.is_grad_enabled() or not is_eager(x):
            return None
        if x.dtype != product_dtype(x) or (autocast_is_on(x.device) and any(self.parameters)):
            return None
        return self.with_ghosts

    @property
    def alone(self) -> Callable[..., torch.Tensor] | None:
        """Function of input, weight and bias, if the layer moves nothing; else ``None``."""
        block = self.block
        if block is None or 0 in block.shape or self.edge_padding is not None or self.moves:
            return None
        return block.convolution


@layer(torch.conv1d, Sample((2, 4, 9)), in_channels=4, out_channels=6, kernel_size=3, padding=1)
class DistributedConv1d(_DistributedConv):
    _dims = 1


@layer(torch.conv2d, Sample((2, 4, 9, 8)), in_channels=4, out_channels=6, kernel_size=3, padding=1)
class DistributedConv2d(_DistributedConv):
    _dims = 2


@layer(
    torch.conv3d, Sample((2, 4, 5, 6, 3)), in_channels=4, out_channels=6, kernel_size=3, padding=1
)
class DistributedConv3d(_DistributedConv):
    _dims = 3
