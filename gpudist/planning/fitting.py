"""Find the grids on which a training step fits into the memory of a number of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from math import ceil, inf, prod
from pathlib import Path

import torch
from torch import nn

from gpudist.checks.arguments import Checked, checked
from gpudist.errors import GpudistError, ShapeError
from gpudist.geometry.cartesian import rank_of
from gpudist.planning.advice import Progress, axes_of, dry_network
from gpudist.planning.grids import Grid, grids, imbalance
from gpudist.planning.hardware import Profile, profile_of
from gpudist.planning.rehearsal import DryNetwork, Memory

# Grids of a number that are rehearsed: the estimate does not know how layers compute their blocks.
_TRIED = 3

# A grid is not rehearsed to find the smallest number if its estimate exceeds the memory so often.
_SURELY = 1.5


@dataclass(frozen=True)
class Fit(Checked):
    """Memory of a training step on a number of workers, on the grid that needs the least.

    An estimate, which adds the blocks of all layers with their ghosts, chooses three grids, of
    which the best is taken.

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
    progress: Progress | None = None,
) -> list[Fit]:
    """Return, for each number of workers, the grid that fits best, and its memory at the peak.

    A training step of one or two workers is rehearsed on tensors without data, and the bytes of the
    tensors that are alive are counted: for powers of two, for the smallest number that fits and for
    the numbers beside it. The memory of other numbers is estimated. Workspaces of convolutions, and
    the memory that a device needs before the first tensor, are not counted.

    Args:
        network, global_shape, replicate_parameters, optimizer, recompute, amp: as for :func:`plan`.
        memory_gib: memory of a worker in GiB; by default the profile's.
        profile: profile of the machine.
        most: largest number of workers.
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
    best_grids = {
        ranks: sorted(grids(ranks, dry.global_shape, axes), key=lambda g: _cells(dry, g))[:_TRIED]
        for ranks in range(1, most + 1)
    }
    candidates = _Candidates(dry, best_grids, limit, progress or (lambda *_: None))
    best = candidates.smallest()
    for ranks in numbers_to_show(
        [n for n in best_grids if best_grids[n] or n in candidates.counted], best
    ):
        candidates.count(ranks)
    counted = candidates.counted
    if progress is not None:
        progress("", most, most)
    if not counted:
        reasons = "; ".join(candidates.failures[:3])
        raise ShapeError(f"the network cannot be rehearsed on any grid: {reasons}")
    return [
        counted.get(n) or _estimate(dry, n, best_grids[n][0], counted, limit)
        for n in best_grids
        if n in counted or best_grids[n]
    ]


def numbers_to_show(numbers: Sequence[int], best: int | None) -> list[int]:
    """Return the powers of two, the smallest number that fits, and the numbers beside it."""
    near = {n for pair in pairwise(numbers) for n in pair if best in pair}
    return [n for n in numbers if n & (n - 1) == 0 or n in near]


@dataclass
class _Candidates:
    """Grids of each number of workers, the best by an estimate first, of which some are rehearsed.

    Attributes:
        left: grids of each number that are not rehearsed.
        counted: best rehearsed grid of each number.
        failures: why grids cannot be rehearsed.
    """

    dry: DryNetwork
    left: dict[int, list[Grid]]
    limit: float
    progress: Progress
    counted: dict[int, Fit] = field(default_factory=dict[int, Fit])
    failures: list[str] = field(default_factory=list[str])

    def smallest(self) -> int | None:
        """Return the smallest number that fits: of all smaller ones, no grid may fit.

        Powers of two come first, since estimates are scaled from what is counted.
        """
        next(filter(self._fits, (n for n in self.left if n & (n - 1) == 0)), None)
        best = last = next(filter(self._fits, self.left), None)
        while best is not None and (best := next(filter(self._fits, self.left))) != last:
            last = best
        return best

    def count(self, ranks: int, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Rehearse the grids of a number, and keep the best."""
        while self.left[ranks] and not is_enough():
            self.progress(f"{ranks} workers", len(self.counted), len(self.left))
            least, grid = self.counted.get(ranks), self.left[ranks].pop(0)
            try:
                memory = _count_memory(self.dry, grid, least.memory.total if least else inf)
            except GpudistError as error:
                self.failures.append(f"{list(grid)}: {error}")
                continue
            if least is None or memory.total < least.memory.total:
                is_fit = memory.total <= self.limit
                self.counted[ranks] = Fit(ranks, grid, memory, is_fit, True)

    def _fits(self, ranks: int) -> bool:
        """Return whether a number fits, after rehearsing its grids until one does or none may."""

        def is_settled() -> bool:
            if ranks in self.counted and self.counted[ranks].fits:
                return True
            if not self.counted:
                return False
            grid = self.left[ranks][0]
            estimate = _estimate(self.dry, ranks, grid, self.counted, self.limit)
            return estimate.memory.total > _SURELY * self.limit

        self.count(ranks, is_settled)
        return ranks in self.counted and self.counted[ranks].fits


def _count_memory(dry: DryNetwork, grid: Grid, least: float = inf) -> Memory:
    """Return the memory of the worker that needs most, or of one that needs at least ``least``."""
    # A middle rank has the most ghosts; the first has the largest block.
    middle = rank_of([parts // 2 for parts in grid], grid)
    last = prod(grid) - 1
    chosen = {middle} if middle != last and imbalance(dry, grid) == 1 else {0, middle}
    most = Memory(0, 0, 0)
    for rank in sorted(chosen, reverse=True):
        if most.total < least:
            most = max(most, dry.rehearse(grid, rank).memory, key=lambda memory: memory.total)
    return most


def _estimate(
    dry: DryNetwork, ranks: int, grid: Grid, counted: dict[int, Fit], limit: float
) -> Fit:
    # A worker alone keeps no inputs with ghosts.
    near = counted[min(counted, key=lambda n: (n == 1, abs(n - ranks), n))]
    ratio = _cells(dry, grid) / max(1, _cells(dry, near.grid))
    growing = ("activations", "temporary", "staging")
    scaled = {name: ceil(getattr(near.memory, name) * ratio) for name in growing}
    memory = replace(near.memory, **scaled)
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
