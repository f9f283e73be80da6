"""Whole halo exchanges on one GPU: pack, NCCL messages to itself, unpack.

The last kernel reads the word of a failed world, as between ranks. A block of float32 in three dims
sends one message to each of 6 or 26 neighbours, all of them the rank itself. ``graph`` replays the
same exchange. torch's peer sends the messages without packing.
"""

from __future__ import annotations

from benchmarks.case import Side
from benchmarks.gpu import torch_messages
from benchmarks.gpu.boxes import neighbours, starts
from benchmarks.gpu.enqueue import by_messages
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from gpudist.world.partition import Partition

EXTENTS, TINY = (16, 32, 64, 128, 256), (6,)


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are those of the messages."""
    found: list[GpuCase] = []
    for extent in TINY if tiny else EXTENTS:
        for count in (6, 26):
            nbytes = 4 * starts(neighbours((extent,) * 3, count == 6))[-1]
            for how in ("eager", "graph"):
                for clock in ("device", "enqueue"):
                    parameters = {"extent": extent, "neighbours": count, "how": how}
                    name = f"{count} neighbours of {extent}^3, {how}, {clock}"
                    found.append(
                        GpuCase("self_messages", name, ranks, nbytes, parameters, clock=clock)
                    )
    return found


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    block = (case.parameters["extent"],) * 3
    moves = neighbours(block, case.parameters["neighbours"] == 6)
    ours = by_messages(P_world, block, moves)
    if case.parameters["how"] == "graph":
        return {"gpudist": Side(machine.capture(ours.call), ours.is_right)}
    sizes = [move.source.volume for move in moves]
    theirs = torch_messages.sides(P_world, sizes, lambda rank: 100 * rank)
    return {
        "gpudist": ours,
        # Without messages there is nothing for the GPU to do.
        **{name: side for name, side in theirs.items() if "fake" not in name},
    }
