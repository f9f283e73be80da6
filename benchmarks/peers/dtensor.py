"""DTensor over gloo, in the processes of our own ranks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement

from benchmarks.peers import gloo
from gpudist.world.partition import Partition


def mesh(P_world: Partition) -> DeviceMesh:
    """Return a mesh of all ranks."""
    gloo.start(P_world)
    return init_device_mesh("cpu", (P_world.size,))


def redistribute(
    x: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement
) -> torch.Tensor:
    """Return this rank's part after a change of placement; ``x`` is its part before."""
    placed = DTensor.from_local(x, mesh, [source], run_check=False)
    return placed.redistribute(placements=[target]).to_local()
