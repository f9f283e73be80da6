"""Torch.distributed between all ranks, as a peer: over NCCL on GPUs, over gloo on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement

from benchmarks.gpu.torch_messages import start
from gpudist.world.partition import Partition

Pieces = Sequence[tuple[int, torch.Tensor]]


def named(name: str, P_world: Partition) -> str:
    """Return the name of a peer with the backend that carries it."""
    return f"{name}, {start(P_world)}"


def exchange(sends: Pieces, receives: Pieces) -> None:
    """Send and receive contiguous tensors by ``batch_isend_irecv``, all in flight at once."""
    operations = [dist.P2POp(dist.irecv, x, peer) for peer, x in receives]
    operations += [dist.P2POp(dist.isend, x, peer) for peer, x in sends]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def mesh(P_world: Partition) -> DeviceMesh:
    """Return a mesh of all ranks, for DTensor."""
    start(P_world)
    return init_device_mesh(P_world.device.type, (P_world.size,))


def redistribute(
    x: torch.Tensor, mesh: DeviceMesh, source: Placement, target: Placement
) -> torch.Tensor:
    """Return this rank's part after DTensor changed the placement; ``x`` is its part before."""
    placed = DTensor.from_local(x, mesh, [source], run_check=False)
    return placed.redistribute(placements=[target]).to_local()
