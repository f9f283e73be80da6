"""What is known of a value in a forward before it runs: the partition of a tensor, for one.

A tensor is known by its partition, a ``CartesianPartition``; everything else that depends on no
tensor is known by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.partition import CartesianPartition


@dataclass(frozen=True)
class Extents:
    """The extents of a tensor's block along some dims.

    Attributes:
        P: of the tensor.
        node: that makes the tensor.
        dims: of the tensor.
    """

    P: CartesianPartition
    node: torch.fx.Node
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """The extent of a tensor's block along a dim."""

    P: CartesianPartition
    node: torch.fx.Node
    dim: int


@dataclass(frozen=True)
class Count:
    """A number that follows from extents along dims that are whole: the same on all workers."""


@dataclass(frozen=True)
class Whole:
    """A parameter or buffer, which every worker has whole."""

    shape: tuple[int, ...]
    is_parameter: bool


class Sized(CartesianPartition):
    """The partition of a tensor whose extents have a name. It is equal to any other of its workers.

    Attributes:
        extents: along the dims that are split. Tensors of one name have the same; those of two may.
    """

    extents: object

    @classmethod
    def anew(cls, P: CartesianPartition) -> CartesianPartition:
        """The partition of a tensor on ``P`` whose extents are those of no other one."""
        new = cls(P.wire, P.ranks, P.shape)
        new.extents = object()
        return new

    def __repr__(self) -> str:
        return repr(CartesianPartition(self.wire, self.ranks, self.shape))


class Pooled(Sized):
    """The partition of a tensor with one cell per spatial dim, on the workers at index 0 there.

    Others hold empty blocks. It is equal to the partition of the tensor that was pooled.
    """

    @classmethod
    def of(cls, P: CartesianPartition) -> CartesianPartition:
        return cls.anew(P) if set(P.shape[2:]) - {1} else resized(P)


def resized(P: CartesianPartition) -> CartesianPartition:
    """The partition of a tensor that may have other extents than any known one on ``P``."""
    return Sized.anew(P)


def are_of_one_size(tensors: Sequence[CartesianPartition]) -> bool:
    """Whether the tensors are known to have the same extents in the dims that are split."""
    names = {getattr(P, "extents", id(P)) for P in tensors}
    return len(names) == 1 or all(max(P.shape, default=1) == 1 for P in tensors)


def depends_on_tensors(value: Any) -> bool:
    """Whether a value is known only when the forward runs."""
    if isinstance(value, list | tuple):
        return any(map(depends_on_tensors, value))
    if isinstance(value, dict):
        return any(map(depends_on_tensors, value.values()))
    return isinstance(value, CartesianPartition | Extents | Extent | Count | Whole)


def with_shape(P: CartesianPartition, shape: Sequence[int]) -> CartesianPartition:
    """The first workers of ``P`` on a grid."""
    size = 1
    for extent in shape:
        size *= extent
    return P.create_partition_inclusive(range(size)).create_cartesian_topology_partition(shape)


def split_dims(P: CartesianPartition) -> list[int]:
    """The dims that ``P`` splits."""
    return [dim for dim, parts in enumerate(P.shape) if parts > 1]


def without_dims(P: CartesianPartition, dims: Sequence[int]) -> CartesianPartition:
    """The partition of a tensor that has lost these dims, which ``P`` does not split."""
    shape = [parts for dim, parts in enumerate(P.shape) if dim not in dims]
    return P.create_cartesian_topology_partition(shape)


def permuted(P: CartesianPartition, dims: Sequence[int]) -> CartesianPartition:
    """The partition of a tensor on ``P`` whose dims are put in another order."""
    shape = [P.shape[dim] for dim in dims]
    ranks: list[int] = []
    for position in range(P.size):
        index = [0] * P.dim
        for dim, i in zip(dims, index_of(position, shape), strict=True):
            index[dim] = i
        ranks.append(rank_of(index, P.shape))
    return P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)
