"""A rank on one of two hosts: finds its neighbours, trains LeNet-5, adds until the link is cut.

torchrun --nnodes 2 ... rank.py FOLDER
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gpudist
from gpudist.transport.nccl.rendezvous import Rendezvous
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.determinism_bodies import lenet5

# The last rank waits longer, so that its neighbour reports the cut link before it, and closes.
TIMEOUTS_S = (4.0, 4.0, 4.0, 6.0)
STEPS = 3
# By then every rank has long been adding.
ROUNDS = 20


def note(folder: Path, name: str, value: Any) -> None:
    """Write a file that is there whole or not at all."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(value))
    part.rename(folder / name)


def images_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 1, 28, 28, generator=generator, dtype=torch.float64)
    return images, torch.randint(10, (8,), generator=generator)


def losses_of(P: Partition) -> list[float]:
    """Return the losses of LeNet-5, every rank of four with a quarter of the images."""
    torch.manual_seed(0)
    network = lenet5(P).double()
    two = P.create_partition_inclusive([0, 1]).create_cartesian_topology_partition([1, 2])
    criterion = gpudist.nn.DistributedCrossEntropyLoss(two)
    row, column = divmod(P.wire.rank, 2)
    losses = []
    for step in range(STEPS):
        images, labels = images_of(step)
        block = images[..., 14 * row : 14 * (row + 1), 14 * column : 14 * (column + 1)]
        loss = criterion(network(block.contiguous()), labels)
        network.zero_grad()
        loss.backward()
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
        losses.append(loss.item())
    return losses


def wire_of_one_node(rank: int, size: int, store: dist.Store) -> str:
    """Return the wire that ranks choose if their launcher declares a single node."""
    launch = replace(runtime.launch(), local_size=size, run="one node")
    wire = runtime._connect_all("host", store, launch, 60.0, None, False)
    name = wire.name
    wire.close()
    return name


def add_until_the_link_is_cut(P_world: Partition, folder: Path) -> None:
    rank, size = P_world.wire.rank, P_world.size
    line = P_world.create_cartesian_topology_partition([size])
    expected = torch.full([5], float(size))
    rounds, start_s = 0, 0.0
    try:
        while True:
            start_s = time.monotonic()
            assert torch.equal(gpudist.all_sum_reduce(torch.ones(5), line, [0]), expected)
            rounds += 1
            if rounds == ROUNDS:
                note(folder, f"adding{rank}", rounds)
    except gpudist.GpudistError as error:
        seconds = time.monotonic() - start_s
        note(folder, f"error{rank}", [type(error).__name__, str(error), seconds])
    # The end of a process is reported as what it is, so none ends before its neighbour's deadline.
    while not all((folder / f"error{other}").exists() for other in range(size)):
        time.sleep(0.02)


def main() -> None:
    folder = Path(sys.argv[1])
    rank = runtime.launch().rank
    # The first to be registered is the last to be called.
    atexit.register(note, folder, f"ended{rank}", True)
    P_world = gpudist.init(timeout=60)
    store = runtime._runtime.store
    assert store is not None
    beside = Rendezvous(store, "test", rank, P_world.size, 60.0, lambda: None).arrive()
    found = {
        "transport": P_world.transport,
        "of one node": wire_of_one_node(rank, P_world.size, store),
        "pid": os.getpid(),
        "beside": beside,
        "losses": losses_of(P_world),
    }
    note(folder, f"found{rank}", found)
    P_world.wire.timeout_s = TIMEOUTS_S[rank]
    add_until_the_link_is_cut(P_world, folder)


if __name__ == "__main__":
    main()
