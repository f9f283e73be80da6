"""Find the grids on which a training step fits into the memory of a number of workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil, inf, prod
from pathlib import Path

import torch
from torch import nn

from gpudist.checks.arguments import Checked, checked
from gpudist.errors import GpudistError, ShapeError
from gpudist.planning.advice import Progress, axes_of, dry_network
from gpudist.planning.grids import Grid, grids, imbalance
from gpudist.planning.hardware import Profile, profile_of
from gpudist.planning.rehearsal import DryNetwork, Memory

# Grids of a number that are rehearsed: the estimate does not know how layers compute their blocks.
_TRIED = 3


@dataclass(frozen=True)
class Fit(Checked):
    """Memory of a training step on a number of workers, on the grid that needs the least.

    An estimate, which adds the blocks of all layers with their ghosts, chooses three grids, and the
    best of those that are rehearsed in time is taken.

    Attributes:
        ranks: number of workers.
        grid: shape of the partition of the input.
        memory: memory of the worker that needs most.
        fits: whether it is at most the memory of a worker.
        is_counted: whether a step on this grid was rehearsed; otherwise, activations, temporary
            tensors and staging are those of the nearest counted number above 1, times the ratio of
            the estimates.
    """

    ranks: int
    grid: Grid
    memory: Memory
    fits: bool
    is_counted: bool


@checked()
def fits(
    network: nn.Module | Sequence[nn.Module],
    global_shape: Sequence[int] | torch.Tensor | Sequence[Sequence[int] | torch.Tensor],
    memory_gib: float = 0.0,
    profile: str | Path | Profile = "h100",
    *,
    most: int = 64,
    replicate_parameters: bool = True,
    optimizer: str = "adam",
    recompute: bool = False,
    amp: torch.dtype | None = None,
    limit_s: float = 40.0,
    progress: Progress | None = None,
) -> list[Fit]:
    """Return, for each number of workers, the grid that fits best, and its memory at the peak.

    A training step of one or two workers is rehearsed on tensors without data, and the bytes of the
    tensors that are alive are counted. Workspaces of convolutions, and the memory that a device
    needs before the first tensor, are not counted.

    Args:
        network, global_shape, replicate_parameters, optimizer, recompute, amp: as for :func:`plan`.
        memory_gib: memory of a worker in GiB; by default the profile's.
        profile: profile of the machine.
        most: largest number of workers.
        limit_s: seconds after which the remaining numbers are estimated. Those up to the smallest
            that fits come first.
        progress: function called with the next item, the number of finished items, and the total.

    Returns:
        A value per number of workers that has a grid, ascending.

    Raises:
        ShapeError: the network cannot be called, or converted for any number of workers.
    """
    if not isinstance(profile, Profile):
        profile = profile_of(profile)
    limit = (memory_gib or profile.memory_gib) * 2**30
    if limit <= 0 or most < 1:
        raise ShapeError(
            f"fits: {memory_gib} GiB and {most} workers; give the memory of a worker (--memory), "
            "and at least one worker"
        )
    how = replicate_parameters, optimizer, recompute, amp
    dry = dry_network(network, global_shape, profile, *how)
    refusals: dict[int, str] = {}
    axes = axes_of(dry, refusals)
    ranked = {
        ranks: sorted(grids(ranks, dry.global_shape, axes), key=lambda g: _cells(dry, g))[:_TRIED]
        for ranks in range(1, most + 1)
    }
    counted: dict[int, Fit] = {}
    failures: list[str] = []

    def count(ranks: int) -> None:
        """Rehearse the next grid that the conversion accepts, and keep the best."""
        least = counted.get(ranks)
        while ranked[ranks]:
            grid = ranked[ranks].pop(0)
            try:
                memory = _counted(dry, grid, least.memory.total if least else inf)
            except GpudistError as error:
                failures.append(f"{list(grid)}: {error}")
                continue
            if least is None or memory.total < least.memory.total:
                counted[ranks] = Fit(ranks, grid, memory, memory.total <= limit, True)
            return

    end_s = time.monotonic() + limit_s
    order = _Order([n for n, found in ranked.items() if found])
    for ranks in order.numbers(lambda n: n in counted and counted[n].fits):
        if progress is not None:
            progress(f"{ranks} workers", len(counted), len(order.all))
        if len(counted) > 1 and time.monotonic() > end_s:
            break
        count(ranks)
    if progress is not None:
        progress("", len(order.all), len(order.all))
    if not counted:
        raise ShapeError(f"the network cannot be rehearsed on any grid: {'; '.join(failures[:3])}")
    return [
        counted.get(n) or _estimated(dry, n, ranked[n][0], counted, limit)
        for n in order.all
        if n in counted or ranked[n]
    ]


class _Order:
    """Order of the numbers of which a grid is counted: the smallest that fits is found first."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.all = list(numbers)

    def numbers(self, fits: Callable[[int], bool]) -> Iterator[int]:
        """Yield each number once for every grid.

        Powers of two come first until one fits, then the numbers below, then the other grids of
        all these; then the other numbers, and their other grids.
        """
        first: list[int] = []
        for n in self.all:
            if n & (n - 1) == 0:
                first.append(n)
                yield n
                if fits(n):
                    break
        below = [n for n in self.all if n not in first and (not first or n < first[-1])]
        yield from reversed(below)
        first = sorted((*first, *below), reverse=True)
        powers = [n for n in self.all if n & (n - 1) == 0 and n not in first]
        others = [n for n in self.all if n not in {*first, *powers}]
        # Multiples of large powers of two are those that machines have.
        rest = [*powers, *sorted(others, key=lambda n: (-(n & -n), n))]
        again = range(_TRIED - 1)
        yield from (*(n for n in first for _ in again), *rest, *(n for n in rest for _ in again))


def _counted(dry: DryNetwork, grid: Grid, least: float = inf) -> Memory:
    """Return the memory of the worker that needs most, or of one that needs at least ``least``."""
    # A middle rank has the most ghosts; the first has the largest block.
    middle = 0
    for parts in grid:
        middle = middle * parts + parts // 2
    last = prod(grid) - 1
    chosen = {middle} if middle != last and imbalance(dry, grid) == 1 else {0, middle}
    most = Memory(0, 0, 0)
    for rank in sorted(chosen, reverse=True):
        if most.total < least:
            most = max(most, dry.rehearse(grid, rank).memory, key=lambda memory: memory.total)
    return most


def _estimated(
    dry: DryNetwork, ranks: int, grid: Grid, counted: dict[int, Fit], limit: float
) -> Fit:
    # A worker alone keeps no inputs with ghosts.
    near = counted[min(counted, key=lambda n: (n == 1, abs(n - ranks), n))]
    ratio = _cells(dry, grid) / max(1, _cells(dry, near.grid))
    of = near.memory
    scaled = (ceil(n * ratio) for n in (of.activations, of.temporary, of.staging))
    activations, temporary, staging = scaled
    memory = replace(of, activations=activations, temporary=temporary, staging=staging)
    return Fit(ranks, grid, memory, sum(astuple(memory)) <= limit, False)


def _cells(dry: DryNetwork, grid: Grid) -> int:
    """Return the cells of the largest blocks of all layers' inputs, with ghosts."""
    return sum(
        times * prod(
            ceil(n / parts) + (width if parts > 1 else 0)
            for n, parts in zip(shape, grid, strict=True)
        )
        for (width, shape), times in Counter(dry.layers).items()
        if len(shape) == len(grid)
    )  # fmt: skip


@checked()
def smallest(found: Sequence[Fit]) -> Fit | None:
    """Return the result with the fewest workers whose memory suffices.

    Args:
        found: results of :func:`fits`, the fewest workers first.

    Returns:
        The first result that fits, or ``None``.
    """
    return next((one for one in found if one.fits), None)
