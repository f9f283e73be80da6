"""Base class of affine layers: broadcast input and parameters, compute locally, sum the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpudist.exchange import Movement
from gpudist.geometry.blocks import Blocks
from gpudist.nn.affine.affine_placement import AffinePlacement
from gpudist.nn.autocast import sum_of_products
from gpudist.nn.parameters.parameter import empty_output, zero_bias
from gpudist.nn.parameters.parameter_layer import ParameterLayer, move_those
from gpudist.ops.shape_agreement import BlockLayout


@dataclass(frozen=True)
class BoundAffine:
    """Movements of an affine layer, bound to one input shape.

    Attributes:
        halo: movement of the cells that each computing worker reads; ``None`` if every worker
            already holds them.
        parameters: movements of the weight and the bias; ``None`` for a parameter that is already
            local.
        reduction: movement that sums the outputs; ``None`` if they are not summed.
        features: output channels or features of this worker; ``None`` if it does not compute.
    """

    halo: Movement | None
    parameters: tuple[Movement | None, ...]
    reduction: Movement | None
    features: int | None

    @property
    def moves(self) -> bool:
        """Whether the layer moves any tensor."""
        return any(m is not None for m in (self.halo, self.reduction, *self.parameters))


class AffineLayer(ParameterLayer):
    """Layer that is linear in its weight and bias, and moves them together with its input."""

    _placement: AffinePlacement

    def affine(
        self, bound: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output block, as a composition of differentiable operators.

        Args:
            bound: a :class:`BoundAffine`.
            x: block of the input, or its placeholder.
            weight, bias: this worker's parameters.
        """
        operands = [x, weight] if bias is None else [x, weight, bias]
        block, weight, *biases = move_those((bound.halo, *bound.parameters), operands)
        bias = biases[0] if biases else None
        if bound.features is None:
            dtype = x.dtype if x.is_floating_point() or x.is_complex() else weight.dtype
            y = empty_output(block.shape, dtype, block, weight, bias)
        else:
            if bias is not None and not bias.numel():
                bias = zero_bias(bias, bound.features)
            y = self._compute(bound, x, block, weight, bias)
        return y if bound.reduction is None else self._sum(bound.reduction, y)

    def _bind_matrix(
        self,
        layout: BlockLayout,
        x: torch.Tensor,
        leading: Sequence[Blocks],
        dim: int,
        outputs: torch.dtype | None = None,
    ) -> BoundAffine:
        """Bind the product with a matrix that is split over workers.

        Args:
            layout: agreed layout of ``x``.
            leading: dims of the output in front of its features.
            dim: dim of the weight along which the output has its features.
            outputs: dtype of the output, by default that of ``x``.
        """
        placed = self._placement
        broadcast = placed.bind_broadcast(
            layout.shape_of, layout.key, layout.dtype, (x.shape, x.dtype), x
        )
        features, index = self._placed["weight"].blocks[dim], placed.P_c.index
        placeholder = broadcast.output_shape, outputs or broadcast.output_dtype
        reduction = placed.bind_matrix_sum(
            leading, features, outputs or layout.dtype, placeholder, x
        )
        count = features.length(index[dim - 2]) if index is not None else None
        return BoundAffine(broadcast, self.bind_parameters(), reduction, count)

    def _compute(
        self,
        bound: Any,
        x: torch.Tensor,
        block: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        # This worker's outputs, computed from the cells ``block`` that it reads; ``x`` is the input
        # block before the movement.
        raise NotImplementedError

    def _sum(self, reduction: Movement, y: torch.Tensor) -> torch.Tensor:
        return sum_of_products(reduction, y)
