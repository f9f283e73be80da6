"""Choice between a direct and a nested halo exchange, from integers that all ranks know.

A direct exchange has one group of messages with all neighbours, 26 in three dims. A nested one has
a group for each dim, with two neighbours, and copies the block in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from gpudist.geometry.blocks import Blocks, Decomposition
from gpudist.geometry.halo import Halo, needed_range, reads_own_cells, shifts
from gpudist.geometry.windows import Window

# NCCL's messages of one H200 to itself, packed and unpacked: 24.4 us for 6 and 70.9 us for 26 of a
# block of 16^3, 89.4 us for 6 of 256^3 (1.57 MB): benchmarks/results/gpu/h200/self_messages.jsonl.
# Messages between two GPUs have not been measured.
_GROUP_NS, _MESSAGE_NS, _WIRE_BYTES_PER_US = 10_400, 2_330, 24_000
# Reads and writes at 4109 GB/s: profile_h200_one_rank.json beside it.
_COPIED_BYTES_PER_US = 2_054_000


@dataclass(frozen=True)
class MessageGroup:
    """One group of messages, of the worker with most of each number.

    Attributes:
        messages: messages that the worker sends, or receives if these are more.
        received: cells that it receives.
        copied: cells of its block after the group.
    """

    messages: int
    received: int
    copied: int

    def cost_ns(self, cell_bytes: int) -> int:
        """Return the time of the group in nanoseconds."""
        wire_ns = self.received * cell_bytes * 1000 // _WIRE_BYTES_PER_US
        copy_ns = self.copied * cell_bytes * 1000 // _COPIED_BYTES_PER_US
        return _GROUP_NS + self.messages * _MESSAGE_NS + wire_ns + copy_ns


@dataclass(frozen=True)
class _Most:
    # Of any worker along one axis: other workers it exchanges with, cells of its block, cells that
    # it receives, and cells of its output.
    peers: int
    owned: int
    ghosts: int
    needed: int


def costs_less_nested(inputs: Decomposition, halo: Halo, cell_bytes: int) -> bool:
    """Return whether a nested halo exchange is faster over NCCL than a direct one.

    The result is the same on all ranks. The time is proportional to the workers along each axis.

    Args:
        inputs, halo: see :func:`~gpudist.geometry.halo.plan_halo`.
        cell_bytes: size of a cell.
    """
    direct, nested = groups_of_halo(inputs, halo)
    costs = [sum(group.cost_ns(cell_bytes) for group in groups) for groups in (direct, nested)]
    return costs[1] < costs[0]


def groups_of_halo(
    inputs: Decomposition, halo: Halo
) -> tuple[list[MessageGroup], list[MessageGroup]]:
    """Return the groups of messages of the direct exchange, and those of the nested one."""
    most = [_most(*axis) for axis in zip(inputs.dims, halo.windows, halo.periodic, strict=True)]
    owned, needed = [a.owned for a in most], [a.needed for a in most]
    received = prod(a.owned + a.ghosts for a in most) - prod(owned)
    direct = MessageGroup(prod(1 + a.peers for a in most) - 1, received, prod(needed))
    per_dim = zip(most, inputs.dims, halo.windows, strict=True)
    nested = [
        MessageGroup(axis.peers, prod((*needed[:d], axis.ghosts, *owned[d + 1 :])),
              prod((*needed[: d + 1], *owned[d + 1 :])))
        for d, (axis, blocks, window) in enumerate(per_dim)
        if blocks.parts > 1 or not reads_own_cells(blocks, window)
    ]  # fmt: skip
    return [direct], nested or [direct]


@lru_cache(maxsize=1024)
def _most(inputs: Blocks, window: Window, periodic: bool) -> _Most:
    workers = range(inputs.parts)
    senders: list[set[int]] = [set() for _ in workers]
    takers: list[set[int]] = [set() for _ in workers]
    owned, ghosts, needed = 0, 0, 0
    for worker in workers:
        low, high = needed_range(inputs, window, worker)
        received = 0
        for shift in shifts((low, high), inputs.extent, periodic):
            for owner, start, stop in inputs.overlapping(low - shift, high - shift):
                if owner != worker:
                    senders[worker].add(owner)
                    takers[owner].add(worker)
                if owner != worker or shift:
                    received += stop - start
        ghosts, needed = max(ghosts, received), max(needed, high - low)
        owned = max(owned, inputs.length(worker))
    return _Most(max(map(len, senders + takers)), owned, ghosts, needed)
