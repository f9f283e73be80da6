"""Base class of convolutions and transposed convolutions: channels and placed parameters."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.errors import PartitionError
from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.nn.affine.affine_layer import AffineLayer, BoundAffine
from gpudist.nn.affine.conv_parameters import ConvParameters
from gpudist.nn.affine.conv_placement import ConvPlacement
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.nn.windowed.region_layer import RegionLayer
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.world.partition import CartesianPartition


class ConvLayer(AffineLayer, RegionLayer):
    """Layer that maps blocks of input channels to blocks of output channels."""

    _name: str
    _placement: ConvPlacement
    _parameters_cut: ConvParameters
    P_y: CartesianPartition
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def bind(self, layout: BlockLayout, x: torch.Tensor) -> BoundAffine:
        """Bind the movements and the local computation to an agreed input layout."""
        raise NotImplementedError

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

    def _place_parameters(self, replicate_parameters: bool) -> None:
        placed = self._placement
        users = {"weight": placed.P_c, "bias": placed.P_bias_used}
        self._place(replicate_parameters, self._placements(), users, placed.P_all)

    def _placements(self) -> dict[str, ParameterPlacement]:
        return self._parameters_cut.placements(self.bias is not None)
