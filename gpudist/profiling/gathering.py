"""Gather texts of all ranks, whose lengths only their owners know."""

from __future__ import annotations

import torch

from gpudist.transport.base import Signature
from gpudist.world.partition import Partition


def collected(P: Partition, text: bytes) -> list[bytes]:
    """Gather every member's text on rank 0, by rank; empty elsewhere. Collective over ``P``."""
    lengths = [length for (length,) in P.allgather_data([len(text)])]
    buffers = [torch.empty(length, dtype=torch.uint8) for length in lengths]
    buffers[P.rank or 0] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with P.wire.group(Signature.of(f"collect texts on {list(P.shape)}", P.digest)):
        if P.rank != 0:
            P.communicator.send(buffers[P.rank or 0], 0)
        else:
            for rank in range(1, P.size):
                P.communicator.recv(buffers[rank], rank)
    return [buffer.numpy().tobytes() for buffer in buffers] if P.rank == 0 else []


def gathered(P: Partition, text: bytes) -> list[bytes]:
    """Gather every member's text on every member, by rank. Collective over ``P``."""
    lengths = [length for (length,) in P.allgather_data([len(text)])]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = torch.empty((P.size, len(mine)), dtype=torch.uint8)
    with P.wire.group(Signature.of(f"gather texts on {list(P.shape)}", P.digest)):
        P.communicator.all_gather(mine, every)
    return [row.numpy().tobytes()[:n] for row, n in zip(every, lengths, strict=True)]
