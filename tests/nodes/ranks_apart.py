"""A rank whose launcher takes two hosts for one; it adds until the link is cut.

RANK=... WORLD_SIZE=... LOCAL_WORLD_SIZE=... python ranks_apart.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import gpudist
from gpudist import runtime
from gpudist.transport.host import HostTransport, NotOneNode
from gpudist.transport.nccl_rendezvous import Rendezvous

TIMEOUT_S = 2.0
# By then every rank has long been in the loop.
ROUNDS = 20


def note(folder: Path, name: str, value: object) -> None:
    """Write a file that is there whole or not at all."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(value))
    part.rename(folder / name)


def main() -> None:
    folder = Path(sys.argv[1])
    P_world = gpudist.init(timeout=TIMEOUT_S)
    rank, size = P_world.wire.rank, P_world.size
    store = runtime._runtime.store
    assert store is not None
    beside = Rendezvous(store, "test", rank, size, 20.0, lambda: None).arrive()
    refusal = ""
    try:
        HostTransport(store, rank, size, 20.0, prefix="test")
    except NotOneNode as error:
        refusal = str(error)
    seen = {"transport": P_world.transport, "refusal": refusal, "pid": os.getpid()}
    note(folder, f"seen{rank}", seen | {"beside": beside})
    P_x = P_world.create_cartesian_topology_partition([size])
    expected = torch.full([5], float(size))
    rounds, start_s = 0, 0.0
    try:
        while True:
            start_s = time.monotonic()
            assert torch.equal(gpudist.all_sum_reduce(torch.ones(5), P_x, [0]), expected)
            rounds += 1
            if rounds == ROUNDS:
                note(folder, f"adding{rank}", rounds)
    except gpudist.GpudistError as error:
        seconds = time.monotonic() - start_s
        note(folder, f"error{rank}", [type(error).__name__, str(error), seconds])


if __name__ == "__main__":
    main()
