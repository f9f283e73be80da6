"""Predict the time of published work with the planner: one function for each kind of row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

import gpudist
from benchmarks.predictions.networks import NETWORKS, PLANS
from gpudist.geometry.blocks import Decomposition
from gpudist.planning.clock import Clock, Phase
from gpudist.planning.grids import representative_ranks
from gpudist.planning.hardware import Profile
from gpudist.planning.rehearsal import DryNetwork, Rehearsal
from gpudist.transport.dry import META, DryTransport, Posted, SharedCollective, Traffic
from gpudist.world.partition import Partition

Terms = dict[str, float]
Prediction = tuple[float, Terms]
"""Value in the basic unit (seconds or bytes a second), and seconds of its terms."""

_DTYPES = {8: torch.float64, 4: torch.float32}


def step(
    profile: Profile, network: str, dtype: str, shape: Sequence[int], grid: Sequence[int],
    plan: str = "",
) -> Prediction:  # fmt: skip
    """Forward and backward of a network, under a plan if it is named, on the slowest rank."""
    rehearsals = _rehearsals(profile, network, dtype, shape, grid, plan)
    slowest = max(rehearsals, key=lambda r: r.seconds(True))
    terms = _terms(slowest.forward, slowest.backward)
    return slowest.seconds(True), {**terms, "input (beside the step)": slowest.input_s}


def forward(
    profile: Profile, network: str, dtype: str, shape: Sequence[int], grid: Sequence[int]
) -> Prediction:
    """Forward of a network, on the slowest rank."""
    slowest = max(
        (r.forward for r in _rehearsals(profile, network, dtype, shape, grid)),
        key=lambda phase: phase.overlapped_s,
    )
    return slowest.overlapped_s, _terms(slowest)


def transposes(
    profile: Profile, shape: Sequence[int], itemsize: int, grid: Sequence[int]
) -> Prediction:
    """The transposes X to Y to Z and back to X of pencils, each a repartition."""
    rows, columns = grid
    pencils = [(1, rows, columns), (rows, 1, columns), (rows, columns, 1)]
    return _repartitions(profile, shape, itemsize, [*pencils, *pencils[1::-1]])


def fft(profile: Profile, shape: Sequence[int], itemsize: int, grid: Sequence[int]) -> Prediction:
    """A transform along each of three dims, of cells that a pass reads and writes once."""
    rows, columns = grid
    pencils = [(1, rows, columns), (rows, 1, columns), (rows, columns, 1)]
    seconds, terms = _repartitions(profile, shape, itemsize, pencils)
    block_bytes = prod(shape) * itemsize / prod(grid)
    passes_s = len(shape) * 2 * block_bytes / (profile.memory_gbps * 1e9)
    return seconds + passes_s, {**terms, "transforms": passes_s}


def bus_bandwidth(profile: Profile, collective: str, ranks: int, size_bytes: int) -> Prediction:
    """Bytes a second as nccl-tests count them."""
    seconds, terms = collective_time(profile, collective, ranks, size_bytes)
    passed = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
    return passed * size_bytes / seconds, terms


def collective_time(profile: Profile, collective: str, ranks: int, size_bytes: int) -> Prediction:
    """Seconds of a collective of the wire."""
    # An all-gather passes on as many bytes as a broadcast of all blocks together.
    kind: Any = "all_reduce" if collective == "all_reduce" else "broadcast"
    shared = SharedCollective(kind, tuple(range(ranks)), size_bytes)
    seconds = Clock(profile, 0).transfer_s(Traffic(collectives=(shared,)))
    return seconds, {"collectives": seconds}


def message(profile: Profile, size_bytes: int) -> Prediction:
    """Seconds of a message to another rank while one of the same size arrives."""
    one = (Posted(1, size_bytes, 1),)
    seconds = Clock(profile, 0).transfer_s(Traffic(one, one))
    return seconds, {"messages": seconds}


WORKS: dict[str, Callable[..., Prediction]] = {
    "step": step,
    "forward": forward,
    "transposes": transposes,
    "fft": fft,
    "bus bandwidth": bus_bandwidth,
    "collective": collective_time,
    "message": message,
}


def _rehearsals(
    profile: Profile, network: str, dtype: str, shape: Sequence[int], grid: Sequence[int],
    plan: str = "",
) -> list[Rehearsal]:  # fmt: skip
    with torch.device(META):
        made = NETWORKS[network]().to(getattr(torch, dtype))
    dry = DryNetwork(made, shape, profile)
    edits = PLANS[plan](grid) if plan else None
    ranks = representative_ranks(dry, tuple(grid), edits)
    return [dry.rehearse(grid, rank, edits) for rank in ranks]


def _repartitions(
    profile: Profile, shape: Sequence[int], itemsize: int, grids: Sequence[Sequence[int]]
) -> Prediction:
    """Move a tensor from each grid to the next, as the first rank sees it."""
    # The planner has no complex cells: a pair of real ones is as long.
    dtype = _DTYPES[min(itemsize, 8)]
    cells = (*shape[:-1], shape[-1] * itemsize // dtype.itemsize)
    clock = Clock(profile, 0)
    size = prod(grids[0])
    wire = DryTransport(0, size, clock, lambda block, *_: tuple(block), profile.wire)
    world = Partition(wire, range(size))
    partitions = [world.create_cartesian_topology_partition(grid) for grid in grids]
    for P_x, P_y in pairwise(partitions):
        if P_x.shape == P_y.shape:
            continue
        block = Decomposition.balanced(cells, P_x.shape).block(P_x.index or ())
        x = torch.empty(block.shape, dtype=dtype, device=META)
        gpudist.repartition(x, P_x, P_y, global_shape=cells)
    return clock.phase.serial_s, _terms(clock.phase)


def _terms(*phases: Phase) -> Terms:
    found: Terms = {}
    for phase in phases:
        for term, seconds in phase.terms_s.items():
            found[term] = found.get(term, 0.0) + seconds
    # What moves beside kernels is in the terms, but not in the time.
    hidden_s = sum(phase.serial_s - phase.overlapped_s for phase in phases)
    return {**found, "hidden": -hidden_s} if hidden_s > 0 else found
