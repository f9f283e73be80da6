"""Weight and bias of a convolution: decomposition and initialization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.nn.affine.conv_placement import ConvPlacement
from gpudist.nn.parameters.parameter import bias_bound, kaiming_bound, uniform_parameter
from gpudist.nn.parameters.parameter_placement import ParameterPlacement


@dataclass(frozen=True)
class ConvParameters:
    """Decomposition of the weight and the bias.

    Attributes:
        name: name of the layer.
        placed: workers that own and use the parameters.
        weight_cut, bias_cut: decompositions into one block per owner.
        axes: axis of the owners' grid that splits each dim of the weight.
    """

    name: str
    placed: ConvPlacement
    weight_cut: Decomposition
    bias_cut: Decomposition
    axes: tuple[int, ...]

    @classmethod
    def cut(
        cls,
        name: str,
        placed: ConvPlacement,
        weight_shape: Sequence[int],
        out_channels: int,
        channel_axes: tuple[int, int] = (0, 1),
    ) -> ConvParameters:
        """Cut both parameters into balanced blocks.

        Args:
            name, placed: name and placement of the layer.
            weight_shape: global shape of the weight, with its two channel dims first.
            out_channels: global size of the bias.
            channel_axes: grid axes that split the two channel dims.
        """
        parts = placed.weight_grid
        grid = [*(parts[axis] for axis in channel_axes), *(1,) * (len(weight_shape) - 2)]
        return cls(
            name,
            placed,
            Decomposition.balanced(weight_shape, grid),
            Decomposition.balanced((out_channels,), parts[:1]),
            (*channel_axes, *range(2, len(weight_shape))),
        )

    def draw(
        self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Draw this worker's blocks with torch's initialization, or return placeholders.

        Every worker must call this method, to keep all random generators in the same state.
        """
        # Torch computes the fan-in from the second dim, also for transposed convolutions.
        fan_in = prod(self.weight_cut.shape[1:])
        index = self.placed.P_weight.index
        weight = uniform_parameter(
            self.weight_cut.shape,
            kaiming_bound(fan_in),
            self.weight_cut.block([index[axis] for axis in self.axes])
            if index is not None
            else None,
            device,
            dtype,
        )
        if not bias:
            return weight, None
        index = self.placed.P_bias.index
        box = self.bias_cut.block(index[:1]) if index is not None else None
        return weight, uniform_parameter(
            self.bias_cut.shape, bias_bound(fan_in), box, device, dtype
        )

    def placements(self, bias: bool) -> dict[str, ParameterPlacement]:
        """Return the placement of the weight and, if there is one, of the bias."""
        placed = self.placed
        weight = ParameterPlacement(placed.P_weight, self.weight_cut, self.axes)
        if not bias:
            return {"weight": weight}
        return {"weight": weight, "bias": ParameterPlacement(placed.P_bias, self.bias_cut, (0,))}


def require_groups(name: str, in_channels: int, out_channels: int, groups: int) -> None:
    """Raise if ``groups`` does not divide the numbers of channels."""
    if groups < 1:
        raise ShapeError(f"{name}, dim 1: groups {groups} must be at least 1")
    for what, channels in (("in", in_channels), ("out", out_channels)):
        if channels % groups:
            raise ShapeError(
                f"{name}: {what}_channels {channels} must be divisible by groups {groups}"
            )
