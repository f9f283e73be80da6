"""Base class of convolutions and transposed convolutions: channels and placed parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.errors import PartitionError
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.nn.affine.affine_layer import AffineLayer, BoundAffine
from gpudist.nn.affine.affine_placement import AffinePlacement, place_channels
from gpudist.nn.autocast import in_product_dtype
from gpudist.nn.windowed.region_layer import RegionLayer
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


class ConvLayer(AffineLayer, RegionLayer):
    """Layer that maps blocks of input channels to blocks of output channels."""

    _dims: int
    P_y: CartesianPartition
    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> BoundAffine:
        self._require_dtype(layout.dtype)
        # The first number is the way of the parameters.
        return self.bind(layout, x, *numbers[1:])

    def bind(self, layout: BlockLayout, x: torch.Tensor, *output_size: int) -> BoundAffine:
        """Bind the movements and the local computation to an agreed input layout."""
        raise NotImplementedError

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Cast ``x`` as autocast would, before its ghosts move; sums of products need its dtype."""
        return x if self._placement.P_sum is not None else in_product_dtype(x)

    def convolve(
        self, bound: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output block for this worker's parameters and the result of :meth:`bind`."""
        return self.affine(bound, x, weight, bias)

    def require_region(self) -> None:
        if self._placement.P_source is not None or self._placement.P_sum is not None:
            raise PartitionError(
                f"{self._name}, dim 1: a layer of a HaloRegion must not split channels; omit P_y "
                "and P_w, or move the layer out of the region"
            )

    def outputs_of(self, inputs: Decomposition) -> Decomposition:
        batch, _, *features = super().outputs_of(inputs).dims
        return Decomposition((batch, Blocks(self.out_channels, 1), *features))

    def _place_channels(
        self,
        P_x: CartesianPartition,
        P_y: CartesianPartition | None,
        P_w: CartesianPartition | None,
        global_shape: Sequence[int] | None,
        shape: ShapeMode,
    ) -> AffinePlacement:
        channels = self.in_channels, self.out_channels, self.groups
        placed = place_channels(self._name, P_x, P_y, P_w, *channels, self._dims)
        self._placement = placed
        self.P_x, self.P_y = placed.P_x, placed.P_y
        self._agree_on(placed.P_x, P_x.dim, global_shape, shape, placed.P_all)
        return placed

    def _make_parameters(
        self,
        weight_shape: Sequence[int],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        replicate_parameters: bool,
        channel_dims: tuple[int, int] = (0, 1),
    ) -> None:
        placed = self._placement
        cells = self.out_channels if bias else None
        used = placed.parameters(weight_shape, cells, channel_dims)
        self._place(replicate_parameters, used, placed.P_all)
        self._draw_affine(device, dtype)

    def _groups_of_block(self) -> int:
        # Groups are split like output channels.
        return self.groups // self._placement.parts[0] if self.groups > 1 else 1
