"""Distributed transposed convolution over any partition of batch, channels and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.composed import Read
from gpudist.geometry.halo import needed_range, reads_own_cells
from gpudist.geometry.windows import HaloWidths, TransposedWindow, Window
from gpudist.nn.affine.conv_channels import (
    bind_spread,
    bind_sum,
    output_shapes,
    require_input_channels,
)
from gpudist.nn.affine.conv_layer import ConvLayer
from gpudist.nn.affine.conv_parameters import ConvParameters, require_groups
from gpudist.nn.affine.conv_placement import place
from gpudist.nn.affine.conv_transpose_block import TransposedBlock, transposed_block
from gpudist.nn.autocast import sum_of_products
from gpudist.nn.parameters.layer import move_those
from gpudist.nn.parameters.parameter import tied_empty, zero_bias
from gpudist.nn.partitions import leading_partitions, require_types
from gpudist.nn.windowed.region_layer import BlockOperation
from gpudist.nn.windowed.window import per_dim
from gpudist.ops.agreement import Agreement, ShapeMode
from gpudist.ops.bound import Bound
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.world.partition import CartesianPartition


@dataclass
class _Arguments:
    """The arguments of torch's transposed convolutions, in torch's order, with torch's defaults."""

    in_channels: int
    out_channels: int
    kernel_size: int | Sequence[int]
    stride: int | Sequence[int] = 1
    padding: int | Sequence[int] = 0
    output_padding: int | Sequence[int] = 0
    groups: int = 1
    bias: bool = True
    dilation: int | Sequence[int] = 1
    padding_mode: str = "zeros"
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None


class _DistributedConvTranspose(ConvLayer):
    """Transposed convolution of a tensor ``[B, C, *spatial]`` cut over a Cartesian grid of workers.

    With ``P_x`` alone, batch and features may be split: ``P_x`` has shape ``[batch, 1, *spatial]``.
    With ``P_x, P_y, P_w`` of shapes ``[1, ci, *spatial]``, ``[1, co, *spatial]`` and ``[co, ci,
    *spatial]``, channels are split too. With ``groups > 1``, split channels must be block-diagonal:
    every block holds whole groups, ``co == ci`` and ``P_w`` has shape ``[co, 1, *spatial]``; then
    ``P_x`` alone will do.

    The weight, of shape ``[in_channels, out_channels / groups, *kernel_size]``, lives in blocks on
    the workers of ``P_w`` at spatial index 0 (on rank 0 of ``P_x`` if that is alone), the bias on
    those of them at input channel index 0; other workers hold zero-volume parameters. Initial
    values are those of the torch layer under the same seed. Output blocks are balanced. Outputs
    that no input reaches are the bias.

    Args:
        P_x: owns the input.
        P_y, P_w: own the output, and the weight; optional.
        in_channels ... dtype: as torch's layer, global sizes. ``padding_mode`` is ``"zeros"``.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        replicate_parameters: every worker that uses a block of the parameters holds it. None moves
            in forward; in backward the gradients are summed over who holds the same cells, those of
            several layers together with :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        Forward, one group of messages carries the cells of the input that reach each worker's
        outputs, and the parameters from their owners; with split channels, a broadcast of the input
        and a sum-reduce of the output follow. Backward moves the same bytes the other way. The
        block of the input is copied beside its ghosts unless every worker needs exactly its own
        cells, as with a kernel as wide as the stride; the block of the output is copied where
        torch's paddings cannot cut what the cells reach to it.

    Raises:
        PartitionError: the partitions do not fit each other.
        ShapeError: an argument is not supported, or there are more blocks than channels.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 4.
    """

    _dims: int

    def __init__(
        self,
        P_x: CartesianPartition,
        *arguments: Any,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        replicate_parameters: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._name = type(self).__name__
        P_y, P_w, rest = leading_partitions(self._name, arguments, options)
        given = _Arguments(*rest, **options)
        if isinstance(given.padding, str):
            raise ShapeError(f"{self._name}: padding is {given.padding!r}; use numbers")
        require_types(self._name, given)
        self.in_channels, self.out_channels = given.in_channels, given.out_channels
        self.groups = given.groups
        self._take_windows(given)
        require_groups(self._name, self.in_channels, self.out_channels, self.groups)
        channels = self.in_channels, self.out_channels, self.groups
        placed = place(self._name, P_x, P_y, P_w, *channels, self._dims, replicate_parameters)
        self._placement = placed
        self.P_x, self.P_y = placed.P_x, placed.P_y
        self._agreement = Agreement(
            self._name, placed.P_x, placed.P_all, self._dims + 2, global_shape, shape
        )
        self._bound = Bound[_Bound](shape, self._agreement)
        weight_shape = (self.in_channels, self.out_channels // self.groups, *self.kernel_size)
        self._parameters_cut = ConvParameters.cut(
            self._name,
            placed,
            weight_shape,
            self.out_channels,
            channel_axes=(0, 1) if placed.diagonal else (1, 0),
        )
        self.weight, self.bias = self._parameters_cut.draw(given.bias, given.device, given.dtype)
        self._place_parameters(replicate_parameters)

    def _take_windows(self, given: _Arguments) -> None:
        if given.padding_mode != "zeros":
            raise ShapeError(
                f"{self._name}: padding_mode {given.padding_mode!r} is not supported; use 'zeros'"
            )

        def numbers(what: str) -> tuple[int, ...]:
            return per_dim(self._name, what, getattr(given, what), self._dims)

        self.kernel_size, self.stride = numbers("kernel_size"), numbers("stride")
        self.padding, self.dilation = numbers("padding"), numbers("dilation")
        self.output_padding = numbers("output_padding")
        self.padding_mode = given.padding_mode
        self._windows = self._windows_with(self.output_padding)
        for d, window in enumerate(self._windows):
            if window.output_padding >= max(window.stride, window.dilation):
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: output_padding {window.output_padding} must be "
                    f"smaller than stride {window.stride} or dilation {window.dilation}"
                )

    def _windows_with(self, output_padding: Sequence[int]) -> list[TransposedWindow]:
        windows: list[TransposedWindow] = []
        arguments = self.kernel_size, self.stride, self.dilation, self.padding, output_padding
        for d, numbers in enumerate(zip(*arguments, strict=True)):
            try:
                windows.append(TransposedWindow(*numbers))
            except ShapeError as error:
                raise ShapeError(f"{self._name}, dim {d + 2}: {error}") from None
        return windows

    def forward(self, x: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """The block of the output.

        Args:
            x: the block of the input, or the placeholder for it.
            output_size: global extents of the output, the same on all ranks; ``output_padding``
                stands for them unless given. Those of batch and channels are ignored.

        Raises:
            ShapeError: on every rank alike, if the input does not fit, or has no such output.
        """
        placed = self._placement
        if not placed.P_all.active:
            return x.clone()
        output_size = self._features_of(output_size)
        bound = self._bound(x, self._bind, self.uses_copies, *output_size)
        halo = bound.halo if bound.has_ghosts else None
        x, weight, *biases = move_those((halo, *bound.parameters), [x, *self.own_parameters()])
        bias = biases[0] if biases else None
        if bound.block is None:
            y = tied_empty(x.shape, x.dtype, x, weight, bias)
        else:
            if bias is not None and not placed.P_bias_used.active:
                bias = zero_bias(bias, bound.block.shape[1])
            y = bound.block(x, weight, bias)
        return y if bound.reduction is None else sum_of_products(bound.reduction, y)

    def _features_of(self, output_size: Sequence[int] | None) -> tuple[int, ...]:
        """The extents of the features in ``output_size``; none if it is not given."""
        if output_size is None:
            return ()
        if len(output_size) not in (self._dims, self._dims + 2):
            raise ShapeError(
                f"{self._name}: output_size {list(output_size)} must have {self._dims} or "
                f"{self._dims + 2} entries"
            )
        return tuple(output_size)[-self._dims :]

    def _windows_for(
        self, inputs: Decomposition, output_size: Sequence[int]
    ) -> Sequence[TransposedWindow]:
        """The windows for an input; with ``output_size``, those that give these extents."""
        windows = self._windows
        extents = [blocks.extent for blocks in inputs.dims[2:]]
        if output_size:
            windows = self._windows_with(self._output_padding_for(extents, output_size))
        for d, (window, extent) in enumerate(zip(windows, extents, strict=True)):
            try:
                window.output_extent(extent)
            except ShapeError as error:
                raise ShapeError(f"{self._name}, dim {d + 2}: {error}") from None
        return windows

    def _output_padding_for(
        self, extents: Sequence[int], output_size: Sequence[int]
    ) -> Sequence[int]:
        output_padding: list[int] = []
        sized = zip(self._windows, extents, output_size, strict=True)
        for d, (window, extent, size) in enumerate(sized):
            smallest = window.smallest_extent(extent)
            largest = smallest + window.stride - 1
            if not smallest <= size <= largest:
                raise ShapeError(
                    f"{self._name}, dim {d + 2}: output_size {size} must be from {smallest} to "
                    f"{largest} for an input of {extent} cells"
                )
            output_padding.append(size - smallest)
        return output_padding

    def _bind(self, x: torch.Tensor, uses_copies: int, *output_size: int) -> _Bound:
        placed, layout = self._placement, self._agreement(x)
        inputs = layout.decomposition
        require_input_channels(self._name, inputs, self.in_channels)
        features = self._windows_for(inputs, output_size)
        halo_exchange = HaloExchange(placed.P_x, features)
        windows = halo_exchange.windows
        halo = halo_exchange.bind_to(inputs, layout.dtype, x)
        has_ghosts = not all(map(reads_own_cells, inputs.dims, windows))
        if placed.P_spread is not None:
            halo = halo.then(bind_spread(placed, layout, halo_exchange, halo, x))
            has_ghosts = True
        channels = self._parameters_cut.bias_cut.dims[0]
        shape_of = output_shapes(placed, inputs, windows, channels)
        reduction = None
        if placed.P_sum is not None:
            key = (self._name, inputs, windows, self.out_channels)
            reduction = bind_sum(placed, layout, key, shape_of, halo, x)
        block = None
        if placed.P_c.index is not None:
            block = self._block_at(placed.P_c.index, inputs, features, shape_of)
        return _Bound(halo, self.bind_parameters(), block, reduction, has_ghosts)

    def _block_at(
        self,
        index: Sequence[int],
        inputs: Decomposition,
        windows: Sequence[TransposedWindow],
        shape_of: Callable[[Sequence[int]], tuple[int, ...]],
    ) -> TransposedBlock:
        """What the worker that convolves at an index computes."""
        along = list(zip(windows, inputs.dims[2:], index[2:], strict=True))
        return transposed_block(
            windows,
            [window.outputs(blocks).block(i) for window, blocks, i in along],
            [needed_range(blocks, window, i) for window, blocks, i in along],
            shape_of(index)[:2],
            self._placement.groups_of_block(self.groups),
        )

    @property
    def windows(self) -> Sequence[Window]:
        return HaloWidths(), HaloWidths(), *self._windows

    def require_input(self, inputs: Decomposition) -> None:
        require_input_channels(self._name, inputs, self.in_channels)
        self._windows_for(inputs, ())

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        return transposed_block(
            self._windows,
            [read.outputs for read in reads],
            [read.inside for read in reads],
            shape[:2],
            self.groups,
        )


@dataclass(frozen=True)
class _Bound:
    """What a layer remembers of one shape of its input and one size of its output.

    Attributes:
        halo, parameters: movements of the input, and of the weight and the bias, ``None`` for those
            that are there.
        block: what a worker that convolves computes.
        reduction: movement of its output, if that is summed.
        has_ghosts: some worker needs other cells than its own, so that the input moves.
    """

    halo: Movement
    parameters: tuple[Movement | None, ...]
    block: TransposedBlock | None
    reduction: Movement | None
    has_ghosts: bool


class DistributedConvTranspose1d(_DistributedConvTranspose):
    __doc__ = _DistributedConvTranspose.__doc__
    _dims = 1


class DistributedConvTranspose2d(_DistributedConvTranspose):
    __doc__ = _DistributedConvTranspose.__doc__
    _dims = 2


class DistributedConvTranspose3d(_DistributedConvTranspose):
    __doc__ = _DistributedConvTranspose.__doc__
    _dims = 3
