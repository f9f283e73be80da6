"""Distributed transposed convolution over any partition of batch, channels and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.halo import needed_range, reads_own_cells
from gpudist.geometry.windows import HaloWidths, Read, TransposedWindow, Window
from gpudist.nn.affine.affine_layer import BoundAffine
from gpudist.nn.affine.conv_arguments import require_groups, require_padding_mode
from gpudist.nn.affine.conv_channels import (
    bind_haloed_broadcast,
    output_shapes,
    require_input_channels,
)
from gpudist.nn.affine.conv_layer import ConvLayer
from gpudist.nn.affine.conv_transpose_block import TransposedBlock, transposed_block
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import partitions_lead
from gpudist.nn.windowed.region_layer import BlockOperation
from gpudist.nn.windowed.window import per_dim
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedConvTranspose(ConvLayer):
    """Transposed convolution of a tensor ``[B, C, *spatial]`` partitioned over a Cartesian grid.

    With ``P_x`` alone, batch and features may be split: ``P_x`` has shape ``[batch, 1, *spatial]``.
    With ``P_x, P_y, P_w`` of shapes ``[1, ci, *spatial]``, ``[1, co, *spatial]`` and ``[co, ci,
    *spatial]``, channels are split too. With ``groups > 1``, split channels must be block-diagonal:
    every block holds whole groups, ``co == ci`` and ``P_w`` has shape ``[co, 1, *spatial]``. In
    that case ``P_x`` alone is enough.

    The weight has shape ``[in_channels, out_channels / groups, *kernel_size]``. The workers of
    ``P_w`` at spatial index 0 own its blocks, and those also at input channel index 0 own the
    blocks of the bias. With ``P_x`` alone, its rank 0 owns both. All other workers hold zero-volume
    parameters. Initial values equal those of the torch layer under the same seed. Output blocks are
    balanced. Outputs that no input reaches equal the bias.

    Args:
        P_x: partition of the input.
        P_y, P_w: partitions of the output and of the weight; optional. Pass both, by name or
            directly after ``P_x``.
        in_channels ... dtype: as in the torch layer; sizes are global, and ``padding_mode`` must be
            ``"zeros"``.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        replicate_parameters: keep a copy of each parameter block on every worker that uses it.
            Forward then moves no parameters, and backward sums the gradients over the copies;
            :func:`~gpudist.nn.fuse_parameter_movements` sums those of several layers together.

    Cost:
        In forward, one group of messages carries the cells of the input that reach each worker's
        outputs, and the parameters from their owners; with split channels, a broadcast of the input
        and a sum-reduce of the output follow. Backward moves the same bytes in the opposite
        direction. The input block is copied next to its ghosts, unless every worker reads exactly
        its own cells, as with a kernel as wide as the stride. The output block is copied where
        torch's padding arguments cannot crop the result to it.

    Raises:
        PartitionError: the partitions do not match.
        ShapeError: an argument is not supported, or there are more blocks than channels.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 4.
    """

    @overload
    def __init__(
        self, P_x: CartesianPartition, in_channels: int, out_channels: int,
        kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0, groups: int = 1,
        bias: bool = True, dilation: int | Sequence[int] = 1, padding_mode: str = "zeros",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        P_y: CartesianPartition | None = None, P_w: CartesianPartition | None = None,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, P_x: CartesianPartition, P_y: CartesianPartition, P_w: CartesianPartition,
        in_channels: int, out_channels: int, kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0, groups: int = 1, bias: bool = True,
        dilation: int | Sequence[int] = 1, padding_mode: str = "zeros",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None: ...  # fmt: skip
    @partitions_lead
    def __init__(
        self, P_x: CartesianPartition, in_channels: int, out_channels: int,
        kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0, output_padding: int | Sequence[int] = 0, groups: int = 1,
        bias: bool = True, dilation: int | Sequence[int] = 1, padding_mode: str = "zeros",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        P_y: CartesianPartition | None = None, P_w: CartesianPartition | None = None,
        global_shape: Sequence[int] | None = None, shape: ShapeMode = "static",
        replicate_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        require_padding_mode(self._name, padding_mode, ("zeros",))

        def numbers(what: str, value: int | Sequence[int]) -> tuple[int, ...]:
            return per_dim(self._name, what, value, self._dims)

        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = numbers("kernel_size", kernel_size)
        self.stride, self.dilation = numbers("stride", stride), numbers("dilation", dilation)
        self.padding = numbers("padding", padding)
        self.output_padding = numbers("output_padding", output_padding)
        self.padding_mode = padding_mode
        self._windows = self._windows_with(self.output_padding)
        self._require_output_padding()
        require_groups(self._name, in_channels, out_channels, groups)
        placed = self._place_channels(P_x, P_y, P_w, global_shape, shape)
        weight_shape = (in_channels, out_channels // groups, *self.kernel_size)
        is_diagonal = P_x.shape[1] > 1 and placed.parts[1] == 1
        dims = (0, 1) if is_diagonal else (1, 0)
        self._make_parameters(weight_shape, bias, device, dtype, replicate_parameters, dims)

    def _require_output_padding(self) -> None:
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
        """Return the local block of the output.

        Args:
            x: block of the input, or its placeholder.
            output_size: global extents of the output, the same on all ranks; by default they follow
                from ``output_padding``. Extents of batch and channels are ignored.

        Raises:
            ShapeError: on every rank alike, if the input does not fit, or cannot have an output of
                this size.
        """
        placed = self._placement
        if not placed.P_all.active:
            return x.clone()
        x = self.cast(x)
        output_size = self._features_of(output_size)
        bound = self._bindings(x, self._agree_and_bind, self.way_of(x), *output_size)
        weight, bias = [*self.own_parameters(), None][:2]
        return self.convolve(bound, x, weight, bias)

    def _compute(
        self,
        bound: _BoundConvTranspose,
        x: torch.Tensor,
        block: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        assert bound.block is not None
        return bound.block(block, weight, bias)

    def _features_of(self, output_size: Sequence[int] | None) -> tuple[int, ...]:
        """Return the spatial extents in ``output_size``; empty if it is ``None``."""
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
        """Return the windows for an input, and for ``output_size`` if it is given."""
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

    def bind(self, layout: BlockLayout, x: torch.Tensor, *output_size: int) -> _BoundConvTranspose:
        """Bind the movements and the local computation to an agreed input layout."""
        placed, inputs = self._placement, layout.decomposition
        require_input_channels(self._name, inputs, self.in_channels)
        features = self._windows_for(inputs, output_size)
        halo_exchange = HaloExchange(placed.P_x, features)
        windows = halo_exchange.halo.windows
        halo = halo_exchange.bind_to(inputs, layout.dtype, x)
        has_ghosts = not all(map(reads_own_cells, inputs.dims, windows))
        if placed.P_source is not None:
            halo = halo.then(bind_haloed_broadcast(placed, layout, halo_exchange, halo, x))
            has_ghosts = True
        shape_of = output_shapes(placed, inputs, windows, self.out_channels)
        key = (self._name, inputs, windows, self.out_channels)
        placeholder = halo.output_shape, halo.output_dtype
        reduction = placed.bind_sum(shape_of, key, layout.dtype, placeholder, x)
        block = None
        if placed.P_c.index is not None:
            block = self._block_at(placed.P_c.index, inputs, features, shape_of)
        outputs = block.shape[1] if block is not None else None
        moved = halo if has_ghosts else None
        return _BoundConvTranspose(moved, self.bind_parameters(), reduction, outputs, block)

    def _block_at(
        self,
        index: Sequence[int],
        inputs: Decomposition,
        windows: Sequence[TransposedWindow],
        shape_of: Callable[[Sequence[int]], tuple[int, ...]],
    ) -> TransposedBlock:
        """Return the computation of the convolving worker at ``index``."""
        along = list(zip(windows, inputs.dims[2:], index[2:], strict=True))
        return transposed_block(
            windows,
            [window.outputs(blocks).block(i) for window, blocks, i in along],
            [needed_range(blocks, window, i) for window, blocks, i in along],
            shape_of(index)[:2],
            self._groups_of_block(),
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
class _BoundConvTranspose(BoundAffine):
    """Movements and local computation of a layer, bound to one input shape and output size.

    Attributes:
        block: local transposed convolution; ``None`` on workers that do not convolve.
    """

    block: TransposedBlock | None = None

    @property
    def alone(self) -> Callable[..., torch.Tensor] | None:
        """Function of input, weight and bias, if the layer moves nothing; else ``None``."""
        return None if self.moves else self.block


@layer(
    torch.conv_transpose1d,
    Sample((2, 4, 9)),
    in_channels=4,
    out_channels=2,
    kernel_size=3,
    stride=2,
)
class DistributedConvTranspose1d(_DistributedConvTranspose):
    _dims = 1


@layer(
    torch.conv_transpose2d,
    Sample((2, 4, 9, 8)),
    in_channels=4,
    out_channels=2,
    kernel_size=3,
    stride=2,
)
class DistributedConvTranspose2d(_DistributedConvTranspose):
    _dims = 2


@layer(
    torch.conv_transpose3d,
    Sample((2, 4, 5, 6, 3)),
    in_channels=4,
    out_channels=2,
    kernel_size=3,
    stride=2,
)
class DistributedConvTranspose3d(_DistributedConvTranspose):
    _dims = 3
