"""The modules that a conversion adds to a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.convert.spread import spread, spread_along
from gpudist.nn import Broadcast, DistributedUpsample, Repartition
from gpudist.ops.agreement import Agreement
from gpudist.ops.bound import Bound
from gpudist.partition import CartesianPartition


class RepartitionedFlatten(torch.nn.Module):
    """Moves a tensor to a partition that does not split the dims it flattens, and flattens them.

    Args:
        P_x: owns the input.
        P_y: the input is moved to; its axes at ``start_dim`` to ``end_dim`` are 1.
        start_dim, end_dim: as torch's layer.

    Cost:
        That of :class:`~gpudist.nn.Repartition`, nothing if both partitions are the same.
    """

    def __init__(
        self, P_x: CartesianPartition, P_y: CartesianPartition, start_dim: int, end_dim: int
    ) -> None:
        super().__init__()
        self.P_x, self.P_y = P_x, P_y
        self.start_dim, self.end_dim = start_dim, end_dim
        self.repartition = Repartition(P_x, P_y) if P_x != P_y else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.repartition is not None:
            x = self.repartition(x)
        return x.flatten(self.start_dim, self.end_dim) if self.P_y.active else x

    def extra_repr(self) -> str:
        return f"P_x={list(self.P_x.shape)}, P_y={list(self.P_y.shape)}"


class PermutedDims(torch.nn.Module):
    """The dims of a tensor on ``P_x`` in another order; a view of the block, no communication.

    Workers outside ``P_x`` keep their placeholder.
    """

    def __init__(self, P_x: CartesianPartition, dims: Sequence[int]) -> None:
        super().__init__()
        self.P_x, self.dims = P_x, tuple(dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(self.dims) if self.P_x.active else x

    def extra_repr(self) -> str:
        return f"dims={self.dims}, P_x={list(self.P_x.shape)}"


class SpreadPooled(torch.nn.Module):
    """Copies of a tensor with one cell per spatial dim, for the blocks of a tensor on ``P_x``.

    Args:
        P_x: owns the input: the workers at index 0 of its spatial axes have it, others an empty
            block.

    Cost:
        Messages at the first call alone, to agree on the blocks; and a broadcast along the spatial
        axes, backward a sum-reduce.
    """

    def __init__(self, P_x: CartesianPartition) -> None:
        super().__init__()
        self.P_x = P_x
        self._agreement = Agreement("SpreadPooled", P_x, P_x, P_x.dim)
        self._bound = Bound[Broadcast]("static")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x
        return spread(self._bound(x, self._bind), x)

    def _bind(self, x: torch.Tensor) -> Broadcast:
        return spread_along(range(2, self.P_x.dim), self.P_x, self._agreement(x))

    def extra_repr(self) -> str:
        return f"P_x={list(self.P_x.shape)}"


class InterpolationLike(torch.nn.Module):
    """Interpolation of a tensor on ``P_x`` to the global spatial extents of another one.

    Args:
        P_x, P_like: own the input, and the other tensor.
        options: as of :class:`~gpudist.nn.DistributedUpsample`, without a size.
    """

    def __init__(self, P_x: CartesianPartition, P_like: CartesianPartition, **options: Any) -> None:
        super().__init__()
        self.P_x, self._options = P_x, options
        self._agreement = Agreement("interpolate", P_like, P_like, P_like.dim, None, "static")
        self._by_size: dict[tuple[int, ...], DistributedUpsample] = {}
        self._bound = Bound[DistributedUpsample]("static")

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        return self._bound(like, self._layer_like)(x)

    def _layer_like(self, like: torch.Tensor) -> DistributedUpsample:
        size = self._agreement(like).decomposition.shape[2:]
        if size not in self._by_size:
            self._by_size[size] = DistributedUpsample(self.P_x, size, **self._options)
        return self._by_size[size]
