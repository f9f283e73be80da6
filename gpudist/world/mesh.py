"""Device meshes of torch, with its own process groups, over the workers of a process grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpudist.errors import PartitionError
from gpudist.transport.base import Transport


def mesh_of(
    lines: Sequence[list[list[int]]],
    grid: torch.Tensor | None,
    wire: Transport,
    names: Sequence[str] | None,
) -> DeviceMesh | None:
    """Return this worker's mesh. Collective over torch's default process group.

    Args:
        lines: world ranks of every group along each mesh dim, ascending within a group.
        grid: world ranks of this worker's mesh, ``None`` if it is in no mesh.
        wire: transport of the world; its ranks must equal those of torch's default process group.
        names: names of the mesh dims.

    Raises:
        PartitionError: on every rank alike, if torch's default process group is missing or has
            other ranks.
    """
    if not dist.is_initialized():
        raise PartitionError(
            "create_device_mesh: call torch.distributed.init_process_group() first"
        )
    torchs, ours = (dist.get_rank(), dist.get_world_size()), (wire.rank, wire.size)
    if torchs != ours:
        raise PartitionError(
            f"create_device_mesh: this is rank {ours[0]} of {ours[1]} workers, but rank "
            f"{torchs[0]} of {torchs[1]} in torch's default process group"
        )
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(some)[0]  # pyright: ignore
        for some in lines
    ]
    if grid is None:
        return None
    kind, dim_names = wire.device.type, None if names is None else tuple(names)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=dim_names)
    return DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=dim_names)
