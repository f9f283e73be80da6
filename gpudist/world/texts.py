"""Gather texts of all ranks, whose lengths only their owners know."""

from __future__ import annotations

import numpy as np
import torch

from gpudist.checks.digest import digest_of
from gpudist.transport.base import Signature
from gpudist.world.host_channel import host_partition
from gpudist.world.partition import Partition


def gather_texts_on_first(P: Partition, text: bytes) -> list[bytes]:
    """Gather every member's text on rank 0, by rank; empty elsewhere. Collective over ``P``."""
    if P.size == 1:
        return [text]
    P = host_partition(P)
    lengths = _lengths(P, text)
    buffers = [torch.empty(length, dtype=torch.uint8) for length in lengths]
    buffers[P.rank or 0] = _tensor_of(text)
    with P.wire.group(Signature.of(f"collect texts on {list(P.shape)}", P.digest)):
        if P.rank != 0:
            P.communicator.send(buffers[P.rank or 0], 0)
        else:
            for rank in range(1, P.size):
                P.communicator.recv(buffers[rank], rank)
    return [buffer.numpy().tobytes() for buffer in buffers] if P.rank == 0 else []


def gather_texts(P: Partition, text: bytes) -> list[bytes]:
    """Gather every member's text on every member, by rank. Collective over ``P``.

    Cost:
        Two small all-gathers, the second with as many bytes per member as the longest text; the
        first alone if all texts are empty.
    """
    if P.size == 1:
        return [text]
    P = host_partition(P)
    lengths = _lengths(P, text)
    if not any(lengths):
        return [b""] * P.size
    every = torch.empty((P.size, max(lengths)), dtype=torch.uint8)
    mine = _tensor_of(text.ljust(max(lengths)))
    with P.wire.group(Signature.of(f"gather texts on {list(P.shape)}", P.digest)):
        P.communicator.all_gather(mine, every)
    return [row.numpy().tobytes()[:n] for row, n in zip(every, lengths, strict=True)]


def different_texts(P: Partition, text: str) -> list[str]:
    """Return every member's text, by rank, unless all are equal. Collective over ``P``.

    Cost:
        One small all-gather; three if the texts differ.
    """
    data = text.encode(errors="surrogatepass")
    number = int.from_bytes(digest_of(data)[:7], "little")
    if len({row[0] for row in P.allgather_data([number])}) == 1:
        return []
    return [each.decode(errors="surrogatepass") for each in gather_texts(P, data)]


def _lengths(P: Partition, text: bytes) -> list[int]:
    return [length for (length,) in P.allgather_data([len(text)])]


def _tensor_of(text: bytes) -> torch.Tensor:
    # torch.frombuffer refuses empty texts; it and from_numpy warn of read-only memory.
    return torch.from_numpy(np.frombuffer(bytearray(text), np.uint8))
