"""Placements: the workers a global tensor lies on, as an N-d array of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpudist import runtime
from gpudist.errors import PartitionError
from gpudist.partition import CartesianPartition, Partition
from gpudist.sbp.attributes import NdSbp, broadcast
from gpudist.sbp.layout import Layout


class Placement:
    """An N-d array of ranks of the world.

    Making one never communicates. Two are equal when type, ranks and shape are.

    Args:
        type: ``"cpu"`` or ``"cuda"``, the device of the world.
        ranks: nested lists or an array of ranks of the world, each once.
        P_world: the world, by default the one of :func:`gpudist.init`.

    Attributes:
        ranks: the same, as an array of integers.
        partition: the same, as a partition; one axis for each of the array's.

    Raises:
        PartitionError: a rank is missing from the world or listed twice, or the world is on another
            device.
    """

    def __init__(self, type: str, ranks: Any, P_world: Partition | None = None) -> None:
        P_world = runtime.init() if P_world is None else P_world
        if type != P_world.device.type:
            raise PartitionError(
                f"placement type {type!r}: the tensors of this world are on {P_world.device.type!r}"
            )
        array = np.asarray(ranks)
        if array.ndim == 0 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise PartitionError(
                f"placement ranks {ranks!r} are no array of ranks; give a list such as [0, 1] or "
                "lists of equal length such as [[0, 1], [2, 3]]"
            )
        self.type = type
        self.ranks = array
        members = P_world.create_partition_inclusive(array.flatten().tolist())
        self.partition = members.create_cartesian_topology_partition(array.shape)

    @classmethod
    def of(cls, partition: CartesianPartition) -> Placement:
        """The placement of a partition's workers."""
        ranks = np.asarray(partition.ranks).reshape(partition.shape)
        return cls(partition.device.type, ranks, partition.world)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array of ranks."""
        return self.partition.shape

    @property
    def axes(self) -> int:
        return self.partition.dim

    @property
    def active(self) -> bool:
        """Whether this worker is one of the ranks."""
        return self.partition.active

    @property
    def index(self) -> tuple[int, ...] | None:
        """Of this worker in the array, ``None`` if it is not there."""
        return self.partition.index

    def along(self, axes: Sequence[int]) -> CartesianPartition:
        """The workers that differ from this one along ``axes`` alone."""
        return self.partition.along(axes)

    def layout(self, sbp: NdSbp, shape: tuple[int, ...]) -> Layout:
        """That of a tensor of global ``shape`` here."""
        return Layout(self.partition.ranks, self.shape, sbp, shape)

    def copies(self, shape: tuple[int, ...]) -> Layout:
        """That of copies everywhere."""
        return self.layout((broadcast,) * self.axes, shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.partition == other.partition

    def __hash__(self) -> int:
        return hash(self.partition)

    def __repr__(self) -> str:
        return f"placement(type={self.type!r}, ranks={self.ranks.tolist()})"
