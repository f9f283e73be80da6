"""Experiments: a fault, on one rank, at a point of an operator, over a transport."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.faults import FAULTS, POINTS
from tests.faults.operators import OPERATORS

TRANSPORTS = ("host", "gloo", "nccl", "loopback")
DEADLINE_S = 3.0
LONG_S = 20.0
SLOW_S = 0.3

SMALL, MEDIUM, LARGE = 4 * 1024, 96 * 1024, 1024 * 1024

# Transports whose movements the native core executes, without running any Python.
NATIVE = ("host", "nccl", "loopback")


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
        operator, transport, fault, point: the case to try.
        ranks: size of the world.
        victim: the rank that is struck.
        step: number of successful calls before the fault.
        nbytes: bytes of a message.
        store_rank: the rank that serves the store; the launcher does if ``None``.
        seed: seed of all other draws.
    """

    operator: str
    transport: str
    fault: str
    point: str
    ranks: int
    victim: int
    step: int
    nbytes: int
    store_rank: int | None
    seed: int

    @property
    def deadline_s(self) -> float:
        """Deadline of every wait, in seconds.

        It is short only if survivors detect the fault by it. Otherwise it must not pass before the
        fault, even if many processes share few cores.
        """
        by_deadline = self.fault == "stopped" or (self.point == "init" and self.fault != "slow")
        return DEADLINE_S if by_deadline else LONG_S

    def words(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


Cell = tuple[str, str, str, str]


def why_not(transport: str, fault: str, point: str) -> str:
    """Explain why this experiment is impossible; empty if it is possible."""
    if transport == "loopback":
        if fault not in ("raised", "slow"):
            return "its ranks are threads of one process"
        if point == "init":
            return "its ranks do not join"
        if point == "any time":
            return "a signal comes to the process, not to a rank"
        if fault == "slow" and point in ("packing", "unpacking"):
            return "no other rank runs meanwhile"
    if fault == "raised":
        if point == "unpacking" and transport in NATIVE:
            return "no Python runs there"
        if point == "any time" and transport == "nccl":
            return "that is the point 'message'"
    if point == "any time" and fault == "slow":
        return "it would be the point 'before'"
    return ""


def cells() -> Iterator[Cell]:
    """All that there is to try: operator, transport, fault, point."""
    for operator in OPERATORS:
        for transport in TRANSPORTS:
            for fault in FAULTS:
                for point in POINTS:
                    if not why_not(transport, fault, point):
                        yield operator, transport, fault, point


def experiments(seed: int, chosen: list[Cell] | None = None) -> Iterator[Experiment]:
    """Yield all cells in a random order, then again in another order, for ever.

    Every fault of every operator over every transport occurs once, at some point, before any occurs
    at a second point.
    """
    rng = random.Random(seed)
    table = list(cells()) if chosen is None else list(chosen)
    while True:
        rng.shuffle(table)
        earlier: Counter[tuple[str, str, str]] = Counter()
        turns: list[tuple[int, Cell]] = []
        for cell in table:
            turns.append((earlier[cell[:3]], cell))
            earlier[cell[:3]] += 1
        for _, cell in sorted(turns, key=lambda turn: turn[0]):
            yield draw(rng, *cell)


def draw(rng: random.Random, operator: str, transport: str, fault: str, point: str) -> Experiment:
    row = OPERATORS[operator]
    candidates: Any = range(row.ranks)
    if point in ("packing", "message"):
        candidates = row.gives(row.ranks)
    elif point == "unpacking":
        candidates = row.gets(row.ranks)
    nbytes = rng.choice([SMALL, MEDIUM, LARGE])
    if transport in NATIVE and point in ("packing", "unpacking"):
        nbytes = SMALL  # whose memory is read and written by the rank itself, and not by a peer
    if transport == "host" and point == "message":
        nbytes = MEDIUM if row.is_packed and fault != "raised" else LARGE
    if point == "any time" or (transport == "loopback" and point == "message"):
        nbytes = LARGE
    served = transport != "loopback" and rng.random() < 0.25
    return Experiment(
        operator,
        transport,
        fault,
        point,
        row.ranks,
        rng.choice(list(candidates)),
        rng.randrange(3),
        nbytes,
        0 if served else None,
        rng.randrange(2**31),
    )
