"""Distributed convolution over any partition of batch, channels and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement
from gpudist.exchange.autograd import is_eager
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.composed import Read
from gpudist.geometry.faces import have_faces
from gpudist.geometry.padding import FoldedWindow
from gpudist.geometry.windows import Window
from gpudist.nn.affine.conv_arguments import (
    PADDING_MODES,
    CausalArguments,
    ConvArguments,
    conv_windows,
    require_supported,
)
from gpudist.nn.affine.conv_block import BlockConvolution
from gpudist.nn.affine.conv_channels import (
    bind_spread,
    bind_sum,
    output_shapes,
    require_input_channels,
)
from gpudist.nn.affine.conv_layer import ConvLayer
from gpudist.nn.affine.conv_overlap import ConvolutionInPlace
from gpudist.nn.affine.conv_parameters import ConvParameters
from gpudist.nn.affine.conv_placement import place
from gpudist.nn.autocast import autocast_is_on, sum_of_products
from gpudist.nn.channels_last import channels_last_form, in_form
from gpudist.nn.parameters.layer import move_those
from gpudist.nn.parameters.parameter import tied_empty, zero_bias
from gpudist.nn.partitions import arguments_of, leading_partitions
from gpudist.nn.windowed.edge_padding import (
    EdgePadding,
    bind_edge_padding,
    require_padding_of_input,
)
from gpudist.nn.windowed.in_place import use_in_place
from gpudist.nn.windowed.region_layer import BlockOperation, WithPadding, padding_widths
from gpudist.nn.windowed.window import per_dim
from gpudist.ops.agreement import Agreement, Layout, ShapeMode
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.operator import Bound
from gpudist.world.partition import CartesianPartition


class _DistributedConv(ConvLayer):
    """Convolution of a tensor ``[B, C, *spatial]`` cut over a Cartesian grid of workers.

    With ``P_x`` alone, batch and features may be split: ``P_x`` has shape ``[batch, 1, *spatial]``.
    With ``P_x, P_y, P_w`` of shapes ``[1, ci, *spatial]``, ``[1, co, *spatial]`` and ``[co, ci,
    *spatial]``, channels are split too. With ``groups > 1``, split channels must be block-diagonal:
    every block holds whole groups, ``co == ci`` and ``P_w`` has shape ``[co, 1, *spatial]``; then
    ``P_x`` alone will do.

    The weight lives in blocks on the workers of ``P_w`` at spatial index 0 (on rank 0 of ``P_x`` if
    that is alone), the bias on those of them at input channel index 0; other workers hold
    zero-volume parameters. Initial values are those of the torch layer under the same seed. Output
    blocks are balanced. With ``P_x`` alone, an input in ``torch.channels_last`` gives an output in
    it where torch's convolution does on that device.

    Args:
        P_x: owns the input.
        P_y, P_w: own the output, and the weight; optional.
        in_channels ... dtype: as torch's layer, global sizes.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        overlap: convolve the own block in place, the ghosts of its boundary apart, where that is
            possible and pays; ``False`` refuses. It pays if the largest block has at least
            :data:`~gpudist.nn.windowed.in_place.SMALLEST_BLOCK_BYTES`. Possible with ``P_x``
            alone, in float32 and float64, if no block is empty and each gives its outputs with the
            same padding on both sides (odd kernels whose outputs are cut as their inputs are), with
            zero or circular padding, unless nested, outside of autocast and torch.compile. Sums are
            the same but for rounding.
        nested: exchange ghosts dim after dim, with two neighbours each, instead of with all
            neighbours at once. The numbers are the same.
        replicate_parameters: every worker that uses a block of the parameters holds it. None moves
            in forward; in backward the gradients are summed over who holds the same cells, those of
            several layers together with :func:`~gpudist.nn.fuse_parameter_movements`.

    Cost:
        Forward, one group of messages carries the ghost cells of the input, and the parameters from
        their owners; with split channels, a broadcast of the input and a sum-reduce of the output
        follow. Backward moves the same bytes the other way. The block is copied beside its ghosts
        unless it is convolved in place or no worker needs any, and once more by workers at an edge
        whose padding is reflected or replicated.

    Raises:
        PartitionError: the partitions do not fit each other.
        ShapeError: an argument is not supported, or there are more blocks than channels; at the
            first call, on every rank alike, a kernel or padding does not fit the input.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 4.
    """

    _dims: int
    _arguments: ClassVar[type[ConvArguments] | type[CausalArguments]] = ConvArguments
    _padding_modes = PADDING_MODES

    def __init__(
        self,
        P_x: CartesianPartition,
        *arguments: Any,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        overlap: bool = True,
        nested: bool = False,
        replicate_parameters: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.overlap = overlap and not nested
        self._name = type(self).__name__
        P_y, P_w, rest = leading_partitions(self._name, arguments, options)
        given = arguments_of(self._name, self._arguments, rest, options)
        require_supported(self._name, given, self._padding_modes)
        self.in_channels = given.in_channels
        self.out_channels = given.out_channels
        self.groups = given.groups
        self.kernel_size = per_dim(self._name, "kernel_size", given.kernel_size, self._dims)
        self.stride = per_dim(self._name, "stride", given.stride, self._dims)
        self.dilation = per_dim(self._name, "dilation", given.dilation, self._dims)
        window = (self.kernel_size, self.stride, self.dilation)
        self._paddings = given.paddings(self._name, *window)
        self.padding: str | tuple[int, ...] = (
            given.padding
            if isinstance(given.padding, str)
            else per_dim(self._name, "padding", given.padding, self._dims)
        )
        self.output_padding = (0,) * self._dims
        self.padding_mode = given.padding_mode
        channels = self.in_channels, self.out_channels, self.groups
        placed = place(self._name, P_x, P_y, P_w, *channels, self._dims, replicate_parameters)
        self._placement = placed
        self.P_x, self.P_y = placed.P_x, placed.P_y
        self.halo_exchange = HaloExchange(
            placed.P_x,
            conv_windows(*window, self._paddings, self.padding_mode),
            periodic=self.padding_mode == "circular",
            nested=nested,
        )
        self._agreement = Agreement(
            self._name,
            self._placement.P_x,
            self._placement.P_all,
            self._dims + 2,
            global_shape,
            shape,
        )
        self._bound = Bound[_Bound](shape, self._agreement)
        weight_shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        self._parameters_cut = ConvParameters.cut(
            self._name, placed, weight_shape, self.out_channels
        )
        self.weight, self.bias = self._parameters_cut.draw(given.bias, given.device, given.dtype)
        self._place_parameters(replicate_parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._placement.P_all.active:
            return x.clone()
        bound = self._bound(x, self._agree_and_bind, self.uses_copies)
        weight, bias = [*self.own_parameters(), None][:2]
        as_composition = not is_eager(x) or autocast_is_on(x.device)
        if bound.in_place is not None and not as_composition:
            return bound.in_place(x, weight, bias)
        return self._compose(bound, x, weight, bias)

    def _compose(
        self,
        bound: _Bound,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Move, then convolve: the layer as a composition of differentiable operators."""
        parameters = [weight] if bias is None else [weight, bias]
        halo = bound.halo if bound.has_ghosts else None
        block, weight, *biases = move_those((halo, *bound.parameters), [x, *parameters])
        bias = biases[0] if biases else None
        if bound.block is None:
            y = tied_empty(block.shape, x.dtype, block, weight, bias)
        else:
            if bound.edge_padding is not None:
                block = bound.edge_padding(block)
            if bias is not None and not self._placement.P_bias_used.active:
                bias = zero_bias(bias, weight.shape[0])
            y = bound.block(in_form(block, channels_last_form(x)), weight, bias)
        return y if bound.reduction is None else sum_of_products(bound.reduction, y)

    def _agree_and_bind(self, x: torch.Tensor, uses_copies: int) -> _Bound:
        return self._bind(self._agreement(x), x)

    def _bind(self, layout: Layout, x: torch.Tensor) -> _Bound:
        inputs = layout.decomposition
        self.require_input(inputs)
        try:
            movement = self.halo_exchange.bind_to(inputs, layout.dtype, x)
        except ShapeError as error:
            raise ShapeError(f"{self._name}: {error}") from None
        if self._placement.P_spread is not None:
            spread = bind_spread(self._placement, layout, self.halo_exchange, movement, x)
            movement = movement.then(spread)
        windows, channels = self.windows, self._parameters_cut.bias_cut.dims[0]
        shape_of = output_shapes(self._placement, inputs, windows, channels)
        reduction = None
        if self._placement.P_sum is not None:
            key = (self._name, inputs, windows, self.out_channels)
            reduction = bind_sum(self._placement, layout, key, shape_of, movement, x)
        index = self._placement.P_c.index
        block = self._block(shape_of(index)) if index is not None else None
        bound = _Bound(movement, self.bind_parameters(), block, reduction)
        if any(isinstance(window, FoldedWindow) for window in windows):
            return self._with_edge_padding(bound, inputs, x)
        return self._with_block_in_place(bound, layout, x)

    def _with_edge_padding(self, bound: _Bound, inputs: Decomposition, x: torch.Tensor) -> _Bound:
        """``bound`` with the padding that copies cells, which a halo exchange leaves to do."""
        halo, index = self.halo_exchange, self._placement.P_c.index
        has_ghosts = self._placement.P_spread is not None or have_faces(
            inputs, halo.windows, halo.periodic
        )
        if index is None or bound.block is None or 0 in bound.block.shape:
            return replace(bound, has_ghosts=has_ghosts)
        features = (inputs.dims[2:], halo.windows[2:], index[2:])
        edge_padding = bind_edge_padding(*features, x.device, of_own_block=not has_ghosts)
        return replace(bound, has_ghosts=has_ghosts, edge_padding=edge_padding)

    def _with_block_in_place(self, bound: _Bound, layout: Layout, x: torch.Tensor) -> _Bound:
        """``bound`` without the copy of the block, where that is possible and pays."""
        if self._placement.P_spread is not None or bound.block is None:
            return bound
        use = use_in_place(self.halo_exchange, layout, x, self.overlap)
        if use is None:
            return bound
        if not use.faces:
            block = replace(bound.block, padding=use.padding)
            return replace(bound, block=block, has_ghosts=False)
        return replace(
            bound,
            in_place=ConvolutionInPlace(
                use.faces,
                tuple((slice(None), slice(None), *cells[2:]) for cells in use.outputs),
                bound.parameters,
                use.padding,
                self.stride,
                self.dilation,
                self.groups,
                partial(self._compose, bound),
            ),
        )

    def _block(
        self, shape: Sequence[int], padding: tuple[int, ...] | None = None
    ) -> BlockConvolution:
        groups = self._placement.groups_of_block(self.groups)
        padding = padding or (0,) * self._dims
        return BlockConvolution(tuple(shape), self.stride, self.dilation, groups, padding)

    def require_region(self) -> None:
        if self.padding_mode != "zeros":
            raise ShapeError(
                f"{self._name}: padding_mode {self.padding_mode!r} is not supported in a region, "
                "where cells beyond the edge are constant; use 'zeros'"
            )
        super().require_region()

    @property
    def windows(self) -> Sequence[Window]:
        return self.halo_exchange.windows

    def require_input(self, inputs: Decomposition) -> None:
        require_input_channels(self._name, inputs, self.in_channels)
        require_padding_of_input(self._name, self.padding_mode, self._paddings, inputs.shape[2:])

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        if all(front == behind for front, behind in (read.overhang for read in reads)):
            return self._block(shape, tuple(read.overhang[0] for read in reads))
        return WithPadding(self._block(shape), padding_widths(reads))


@dataclass(frozen=True)
class _Bound:
    """What a layer remembers of one shape of its input.

    Attributes:
        halo, parameters: movements of the input, and of the weight and the bias, ``None`` for those
            that are there.
        block: the convolution, on a worker that convolves.
        reduction: movement of its output, if that is summed.
        has_ghosts: some worker reads cells of others, so that the input moves.
        in_place: the convolution without a copy of the block, where it is to be used.
        edge_padding: what is done to the block and its ghosts before it is convolved.
    """

    halo: Movement
    parameters: tuple[Movement | None, ...]
    block: BlockConvolution | None
    reduction: Movement | None
    has_ghosts: bool = True
    in_place: ConvolutionInPlace | None = None
    edge_padding: EdgePadding | None = None


class DistributedConv1d(_DistributedConv):
    __doc__ = _DistributedConv.__doc__
    _dims = 1


class DistributedConv2d(_DistributedConv):
    __doc__ = _DistributedConv.__doc__
    _dims = 2


class DistributedConv3d(_DistributedConv):
    __doc__ = _DistributedConv.__doc__
    _dims = 3
