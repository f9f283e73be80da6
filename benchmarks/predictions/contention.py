"""Cross-check the planner's links: replay planned messages on a fat tree in SimGrid.

The planner gives every rank its link alone. On a fat tree, messages of different ranks meet in
switches, as static routes lead them. Only messages between nodes are replayed, without those that
are tiny beside the largest, and only their bytes are timed, by both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from gpudist.geometry import (
    Decomposition,
    Halo,
    HaloWidths,
    SlidingWindow,
    plan_halo,
    plan_repartition,
)
from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.planning.clock import Clock
from gpudist.planning.hardware import Profile
from gpudist.transport.dry import Posted, Traffic

Message = tuple[int, int, int]
"""Sender, receiver, bytes."""

RANKS = (64, 512, 4096)
DIFFERS = 0.20
ITEMSIZE = 4
CANDIDATES = (sys.executable, "/usr/bin/python3")
_LEAF = 32  # ranks on a switch of the lowest level
_CUBES = {64: (4, 4, 4), 512: (8, 8, 8), 4096: (16, 16, 16)}
_PENCILS = {64: (8, 8), 512: (16, 32), 4096: (16, 256)}
_TINY = 0.02  # of the largest message


@dataclass(frozen=True)
class Compared:
    """Time of messages on a fat tree.

    Attributes:
        name: name of the messages.
        ranks: number of ranks.
        taper: ranks of a switch for each of its links upwards.
        planned_s: seconds by the planner's links.
        replayed_s: seconds by SimGrid.
    """

    name: str
    ranks: int
    taper: int
    planned_s: float
    replayed_s: float

    @property
    def ratio(self) -> float:
        return self.planned_s / self.replayed_s

    @property
    def differs(self) -> bool:
        """Whether the planner is off by more than 20 %."""
        return abs(self.ratio - 1) > DIFFERS


def halo(ranks: int) -> Iterator[Message]:
    """Faces, edges and corners of blocks of 64 x 64 x 64 cells with 32 channels.

    Edges and corners are tiny beside faces, and are not replayed.
    """
    grid = (1, 1, *_CUBES[ranks])
    blocks = Decomposition.balanced((1, 32, *(64 * n for n in grid[2:])), grid)
    options = Halo((HaloWidths(), HaloWidths(), *[SlidingWindow(3, padding=(1, 1))] * 3))
    for rank in range(ranks):
        (stage,) = plan_halo(blocks, options, index_of(rank, grid)).stages
        yield from ((rank, sent.peer, sent.volume * ITEMSIZE) for sent in stage.sends)


def transpose(ranks: int) -> Iterator[Message]:
    """Pencils to pencils, among ranks that are whole rows of the grid apart."""
    rows, columns = _PENCILS[ranks]
    before, after = (rows, 1, columns), (1, rows, columns)
    cells = (16 * rows, 16 * rows, 32 * columns)
    source, target = Decomposition.balanced(cells, before), Decomposition.balanced(cells, after)
    for rank in range(ranks):
        plan = plan_repartition(
            source, target, rank, index_of(rank, before), index_of(rank, after),
            lambda index: rank_of(index, before), lambda index: rank_of(index, after),
        )  # fmt: skip
        (stage,) = plan.stages
        yield from ((rank, sent.peer, sent.volume * ITEMSIZE) for sent in stage.sends)


def gradients(ranks: int, per_node: int = 8) -> Iterator[Message]:
    """A ring over all nodes for each card of a node, which sum 64 MiB of gradients together."""
    part = 2 * (ranks - 1) * 2**26 // ranks // per_node
    yield from ((rank, (rank + per_node) % ranks, part) for rank in range(ranks))


WORKS: dict[str, Callable[[int], Iterator[Message]]] = {
    "halo, faces": halo,
    "transpose of pencils": transpose,
    "sum of gradients, ring": gradients,
}


def between_nodes(messages: Iterator[Message], per_node: int) -> list[Message]:
    """Return the messages that leave a node, without tiny ones."""
    far = [m for m in messages if m[0] // per_node != m[1] // per_node]
    largest = max(size_bytes for *_, size_bytes in far)
    return [m for m in far if m[2] >= _TINY * largest]


def planned_s(profile: Profile, messages: list[Message]) -> float:
    """Seconds of the slowest rank by the planner's links, for bytes alone."""
    link = replace(profile.network, latency_us=0.0, message_us=0.0)
    machine = replace(profile, network=link)
    sends: dict[int, list[Posted]] = {}
    receives: dict[int, list[Posted]] = {}
    for a, b, size_bytes in messages:
        sends.setdefault(a, []).append(Posted(b, size_bytes, 1))
        receives.setdefault(b, []).append(Posted(a, size_bytes, 1))
    return max(
        Clock(machine, rank).transfer_s(
            Traffic(tuple(sends.get(rank, ())), tuple(receives.get(rank, ())))
        )
        for rank in {*sends, *receives}
    )


def tree_of(ranks: int, taper: int) -> tuple[int, list[int], list[int], list[int]]:
    """Levels, links down and up of each, and parallel links, of a fat tree for ``ranks``."""
    if ranks <= _LEAF * _LEAF // 2:
        return 2, [_LEAF, ranks // _LEAF], [1, _LEAF // taper], [1, 1]
    middle = _LEAF // 2
    return 3, [_LEAF, middle, ranks // _LEAF // middle], [1, _LEAF // taper, middle], [1, 1, 1]


def replayed_s(
    python: str, profile: Profile, ranks: int, taper: int, messages: list[Message]
) -> float:
    """Seconds of all messages by SimGrid."""
    work = {
        "tree": tree_of(ranks, taper),
        "ranks": ranks,
        "bytes_per_s": profile.network.bytes_per_s,
        "messages": messages,
    }
    program = Path(__file__).with_name("replay.py")
    ran = subprocess.run(
        [python, str(program)], input=json.dumps(work), capture_output=True, text=True, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])["seconds"]


@cache
def python_with_simgrid(candidates: tuple[str, ...] = CANDIDATES) -> str | None:
    """Return the first Python that imports SimGrid, or ``None``."""
    for python in candidates:
        try:
            tried = subprocess.run(
                [python, "-c", "import simgrid"], capture_output=True, check=False
            )
        except OSError:
            continue
        if not tried.returncode:
            return python
    return None


def compare(python: str, profile: Profile, ranks: int) -> Iterator[Compared]:
    """Compare all works on a full tree, and on one with half the links upwards."""
    for name, work in WORKS.items():
        messages = between_nodes(work(ranks), profile.ranks_per_node)
        planned = planned_s(profile, messages)
        for taper in (1, 2):
            replayed = replayed_s(python, profile, ranks, taper, messages)
            yield Compared(name, ranks, taper, planned, replayed)
