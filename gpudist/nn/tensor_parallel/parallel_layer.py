"""Base class of tensor-parallel layers."""

from __future__ import annotations

import torch

from gpudist.errors import ShapeError
from gpudist.nn.parameters.parameter_layer import ParameterLayer
from gpudist.nn.tensor_parallel.region import Lengths, TensorRegion


class ParallelLayer(ParameterLayer):
    """Layer whose parameters are split over the workers of a region that use them.

    Attributes:
        region: region of the workers.
        sequence_dim: sequence dim of the tensor that is split over the workers; ``None`` if none
            is.
    """

    def __init__(self, region: TensorRegion, sequence_dim: int | None) -> None:
        super().__init__()
        self.region, self.sequence_dim = region, sequence_dim

    def _sequence_of(self, x: torch.Tensor) -> int:
        """Return the sequence dim, counted from the front; the last dim holds the features."""
        dim, dims = self.sequence_dim or 0, x.dim()
        if not -dims <= dim < dims or dim % dims == dims - 1:
            raise ShapeError(
                f"{self._name}: sequence_dim is {dim}; it must be a dim in front of the features "
                f"of a tensor of shape {list(x.shape)}"
            )
        return dim % dims

    def _sum(self, y: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
        if self.sequence_dim is None:
            return self.region.total(y)
        return self.region.sum_scatter(y, self._sequence_of(y), lengths)

    def extra_repr(self) -> str:
        sequence = f", sequence_dim={self.sequence_dim}" if self.sequence_dim is not None else ""
        return f"workers={self.region.size}, convention={self.region.convention!r}{sequence}"
