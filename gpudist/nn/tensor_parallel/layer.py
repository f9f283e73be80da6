"""What tensor-parallel layers share: parameters beside their use, a sequence that may be split."""

from __future__ import annotations

import torch

from gpudist.errors import ShapeError
from gpudist.nn.parameters.layer import ParameterLayer
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.tensor_parallel.region import Lengths, TensorRegion


class ParallelLayer(ParameterLayer):
    """A layer whose parameters are blocks on the workers of a region, each beside its use.

    Attributes:
        region: the workers.
        sequence_dim: of the tensor that is cut along the sequence over them, if one is.
    """

    _placed: dict[str, Placement]

    def __init__(self, region: TensorRegion, sequence_dim: int | None) -> None:
        super().__init__()
        self._name = type(self).__name__
        self.region, self.sequence_dim = region, sequence_dim

    def _keep(self, **placed: Placement) -> None:
        """Take note of where the parameters are; none of them moves."""
        self._placed = placed
        self._place(True, placed, {}, self.region.P)

    def _placements(self) -> dict[str, Placement]:
        return self._placed

    def _sequence_of(self, x: torch.Tensor) -> int:
        """The dim of the sequence, counted from the front; it is not the last, the features."""
        dim, dims = self.sequence_dim or 0, x.dim()
        if not -dims <= dim < dims or dim % dims == dims - 1:
            raise ShapeError(
                f"{self._name}: sequence_dim {dim} is none of the dims in front of the features of "
                f"a tensor of shape {list(x.shape)}"
            )
        return dim % dims

    def _sum(self, y: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
        """The sum of the workers' tensors, or this worker's block of the sequence of it."""
        if self.sequence_dim is None:
            return self.region.total(y)
        return self.region.sum_scatter(y, self._sequence_of(y), lengths)

    def extra_repr(self) -> str:
        sequence = f", sequence_dim={self.sequence_dim}" if self.sequence_dim is not None else ""
        return f"workers={self.region.size}, convention={self.region.convention!r}{sequence}"
