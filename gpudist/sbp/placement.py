"""Placements: the workers that hold a global tensor, as an N-d array of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpudist.checks.arguments import Checked
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.layout import Layout, NdSbp, broadcast, misfit
from gpudist.nn.autocast import META_AS
from gpudist.world import runtime
from gpudist.world.partition import CartesianPartition, Partition


class Placement(Checked):
    """An N-d array of ranks of the world.

    Creating a placement does not communicate. Placements are equal if their types, ranks and shapes
    are equal.

    Args:
        type: ``"cpu"`` or ``"cuda"``, the device type of the world.
        ranks: nested lists or an array of ranks of the world, each once.
        P_world: world, by default the one of :func:`gpudist.init`.

    Attributes:
        type: device type.
        ranks: ranks as an array of integers.
        partition: the ranks as a partition with the axes of the array.

    Raises:
        PartitionError: a rank is not in the world or is listed twice, or the world uses another
            device type.
    """

    def __init__(self, type: str, ranks: Any, P_world: Partition | None = None) -> None:
        P_world = runtime.init() if P_world is None else P_world
        if type != P_world.device.type:
            raise PartitionError(
                f"placement type {type!r}: the tensors of this world are on "
                f"{P_world.device.type!r}; use that type"
            )
        array = np.asarray(ranks)
        if array.ndim == 0 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise PartitionError(
                f"placement: ranks {ranks!r} do not form an array of integers; give a list such "
                "as [0, 1], or lists of equal length such as [[0, 1], [2, 3]]"
            )
        self.type = type
        self.ranks = array
        members = P_world.create_partition_inclusive(array.flatten().tolist())
        self.partition = members.create_cartesian_topology_partition(array.shape)

    @property
    def autocast(self) -> str | None:
        """The type of device whose autocast is on for the tensors, or ``None``."""
        type = META_AS.type if self.type == "meta" else self.type
        return type if type != "meta" and torch.is_autocast_enabled(type) else None

    @classmethod
    def of(cls, partition: CartesianPartition) -> Placement:
        """Return the placement of the workers of ``partition``, with its axes."""
        ranks = np.asarray(partition.ranks).reshape(partition.shape)
        return cls(partition.device.type, ranks, partition.world)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, P_world: Partition | None = None) -> Placement:
        """Return the placement of the ranks of torch's ``mesh``; its axes are the mesh's dims.

        Args:
            mesh: device mesh of torch.
            P_world: world, by default the one of :func:`gpudist.init`.

        Returns:
            A placement.
        """
        P_world = runtime.init() if P_world is None else P_world
        return cls.of(P_world.create_mesh_partition(mesh))

    def to_partition(self) -> CartesianPartition:
        """Return the workers as a partition; the inverse of :meth:`of`."""
        return self.partition

    def to_mesh(self, names: Sequence[str] | None = None) -> DeviceMesh:
        """Create torch's device mesh of these ranks. Collective over torch's world.

        Args:
            names: names of the mesh's dims.

        Returns:
            A device mesh of torch.

        Raises:
            PartitionError: torch's process group is not initialized, or numbers its ranks
                differently.
        """
        rank = self.partition.world.rank
        if not dist.is_initialized() or dist.get_rank() != rank:
            raise PartitionError(
                "to_mesh: torch's process group is missing or numbers the ranks differently; "
                "call torch.distributed.init_process_group with the ranks of this world, in "
                f"which this process has rank {rank}"
            )
        return DeviceMesh(self.type, self.ranks, mesh_dim_names=tuple(names) if names else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of ranks."""
        return self.partition.shape

    @property
    def axes(self) -> int:
        return self.partition.dim

    @property
    def active(self) -> bool:
        """Whether this worker belongs to the placement."""
        return self.partition.active

    @property
    def index(self) -> tuple[int, ...] | None:
        """Index of this worker in the array; ``None`` outside the placement."""
        return self.partition.index

    def along(self, axes: Sequence[int]) -> CartesianPartition:
        """Return the workers that differ from this one only along ``axes``."""
        return self.partition.along(axes)

    def layout(self, sbp: NdSbp, shape: tuple[int, ...]) -> Layout:
        """Return the layout of a tensor of global ``shape`` with attributes ``sbp``.

        Raises:
            ShapeError: explicit sizes of blocks do not fit.
        """
        wrong = misfit(sbp, self.shape, shape)
        if wrong:
            raise ShapeError(f"a tensor of shape {list(shape)} on {self!r}, {wrong}")
        return Layout(self.partition.ranks, self.shape, sbp, shape)

    def copies(self, shape: tuple[int, ...]) -> Layout:
        """Return the layout of a tensor of ``shape`` that every rank holds in full."""
        return self.layout((broadcast,) * self.axes, shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.partition == other.partition

    def __hash__(self) -> int:
        return hash(self.partition)

    def __repr__(self) -> str:
        return f"placement(type={self.type!r}, ranks={self.ranks.tolist()})"
