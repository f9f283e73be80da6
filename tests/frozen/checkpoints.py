"""A checkpoint of every kind of state, written by one checkout and loaded by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpudist import checkpoint, nn
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition
from tests.frozen.movements import digest


def record(count: int, folder: Path, is_first: bool) -> dict[str, Any]:
    found = run_distributed(_of_rank, 4, str(folder / "checkpoint"), is_first, timeout=60)
    return {f"{key} on rank {rank}": each for rank, one in enumerate(found) for key, each in one}


def _of_rank(P_world: Partition, folder: str, is_first: bool) -> list[tuple[str, Any]]:
    torch.manual_seed(3 if is_first else 4)
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 2])
    network = torch.nn.Sequential(
        nn.DistributedConv2d(P_x, in_channels=1, out_channels=4, kernel_size=3, padding=1),
        nn.DistributedBatchNorm2d(P_x, num_features=4),
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    if is_first:
        network(torch.randn(2, 1, 4, 4)).square().sum().backward()
        optimizer.step()
        checkpoint.save(network, folder, optimizer)
    else:
        checkpoint.load(network, folder, optimizer)
    state = {**network.state_dict(), **_flat(optimizer.state_dict()["state"])}
    return [(name, digest(x)) for name, x in state.items() if isinstance(x, torch.Tensor)]


def _flat(state: dict[Any, Any]) -> dict[str, Any]:
    return {f"state {i} {name}": x for i, one in state.items() for name, x in one.items()}
