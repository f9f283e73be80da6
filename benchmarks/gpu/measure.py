"""Measure a case on a GPU: its sides take turns, their results are checked before and after."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Literal

import torch

from benchmarks.case import MIB, Case, Side
from benchmarks.gpu.machine import Call, Machine
from benchmarks.measure import Series, rows_of
from benchmarks.rows import Row
from gpudist.exchange import all_reduce
from gpudist.world.partition import Partition

ITERATIONS = 30
ROUNDS = 5
WARM_UP_CALLS = 3
# An iteration of the fastest side lasts at least this long. A GPU's queue holds some 1000 launches,
# and a side may make 52 a call.
FASTEST_US = 200.0
MAX_CALLS = 16


Clock = Callable[[Call, int], float]


@dataclass(frozen=True)
class GpuCase(Case):
    """Case on a GPU; its bytes are those that a call must read and write in the GPU's memory.

    Attributes:
        clock: ``"device"``, the time on the GPU, ``"enqueue"``, the time until the call returns,
            or ``"step"``, the time until the GPU is done, from one call to the next.
    """

    clock: Literal["device", "enqueue", "step"] = "device"


@dataclass(frozen=True)
class GpuRow(Row):
    """Line of a result file.

    Attributes:
        gbps: ours, null if the time does not depend on the bytes.
        peak_mib, peer_peak_mib: growth of the GPU's memory during a call.
    """

    gbps: float | None
    peak_mib: float = 0.0
    peer_peak_mib: float | None = None


def measure(
    case: GpuCase,
    sides: Mapping[str, Side],
    machine: Machine,
    P_world: Partition,
    iterations: int,
) -> list[GpuRow]:
    """Return the rows of a case.

    Collective over ``P_world``; times are the maximum over its ranks.
    """
    clocks = {"device": machine.device_us, "enqueue": machine.enqueue_us, "step": machine.step_us}
    clock = clocks[case.clock]
    found = {name: Series(name) for name in sides}
    _check(sides, found, machine)
    calls = _calls([_warm_up(side, clock) for side in sides.values()], P_world)
    rounds = min(ROUNDS, iterations)
    names = list(sides)
    for number in range(rounds):
        share = iterations // rounds + (number < iterations % rounds)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].us += _turn(sides[name], clock, calls, share, P_world)
    peak_bytes = _check(sides, found, machine)
    for series in found.values():
        series.us = maxima(series.us, P_world)
        series.correct = maxima([float(not series.correct)], P_world) == [0.0]
    return [_gpu_row(case, row, peak_bytes) for row in rows_of(case, list(found.values()))]


def maxima(values: Sequence[float], P_world: Partition) -> list[float]:
    """Return the largest of each value over the ranks."""
    if P_world.size == 1:
        return list(values)
    mine = torch.tensor(values, dtype=torch.float64, device=P_world.device)
    largest = all_reduce(mine, P_world, "max")
    P_world.wire.wait()
    return largest.tolist()


def calls_for(us: Sequence[float]) -> int:
    """Return the calls per iteration, equal for all sides, whose calls take ``us`` microseconds."""
    return max(1, min(MAX_CALLS, ceil(FASTEST_US / max(min(us), 1e-3))))


def _calls(us: Sequence[float], P_world: Partition) -> int:
    return calls_for(maxima(us, P_world))


def _check(
    sides: Mapping[str, Side], found: Mapping[str, Series], machine: Machine
) -> dict[str, int]:
    peak_bytes: dict[str, int] = {}
    for name, side in sides.items():
        side.clear()
        result, peak_bytes[name] = machine.peak_bytes(side.call)
        found[name].correct = bool(side.is_right(result)) and found[name].correct
    return peak_bytes


def _warm_up(side: Side, clock: Clock) -> float:
    for _ in range(WARM_UP_CALLS):
        side.call()
    return clock(side.call, 1)


def _turn(side: Side, clock: Clock, calls: int, iterations: int, P_world: Partition) -> list[float]:
    """Return microseconds per call, one number per iteration; a first call is not timed."""
    gc.disable()
    try:
        side.call()
        us: list[float] = []
        for _ in range(iterations):
            if P_world.size > 1:
                P_world.barrier()
            us.append(clock(side.call, calls))
    finally:
        gc.enable()
    return us


def _gpu_row(case: GpuCase, row: Row, peak_bytes: Mapping[str, int]) -> GpuRow:
    moves = case.clock == "device" and case.bytes > 0
    gbps = round(case.bytes / row.us_median / 1e3, 2) if moves else None
    ours, peer = next(iter(peak_bytes)), peak_bytes.get(row.peer)
    return GpuRow(
        **asdict(row),
        gbps=gbps,
        peak_mib=round(peak_bytes[ours] / MIB, 2),
        peer_peak_mib=None if peer is None else round(peer / MIB, 2),
    )
