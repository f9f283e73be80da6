"""Rank the partitions of a network on a machine by their predicted cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpudist.checks.arguments import Checked, checked
from gpudist.convert.block_checkpoints import recompute as recomputed
from gpudist.convert.dry_run import without_cells
from gpudist.convert.network_plan import NetworkPlan
from gpudist.errors import GpudistError, ShapeError
from gpudist.nn.autocast import LOW
from gpudist.planning.grids import Grid, estimate_s, grids, imbalance, representative_ranks
from gpudist.planning.hardware import Profile, profile_of
from gpudist.planning.live_bytes import OPTIMIZERS
from gpudist.planning.rehearsal import DryNetwork, Memory, Rehearsal

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Advice(Checked):
    """Predicted cost of a training step on one partition.

    Attributes:
        grid: shape of the partition of the input.
        slowest: rehearsal of the rank that takes longest.
        rehearsed: all rehearsals.
        overlaps: whether the machine moves messages while kernels run.
        memory_bytes: bytes of the rank that needs most memory.
        imbalance: largest number of input cells of all layers on any rank, divided by the mean.
        fits: whether the memory is at most that of the profile; ``None`` if the profile has none.
        candidates: number of partitions that :func:`plan` chose from; those it did not plan were
            ruled out by a quick estimate, and may be faster.
        plan: edits that the network follows; ``None`` if only the input is split.
        all_messages, all_message_bytes: messages and bytes that all ranks send in a step. If not
            every rank was rehearsed, an upper bound, as if all sent as much as the busiest.
    """

    grid: Grid
    slowest: Rehearsal
    rehearsed: tuple[Rehearsal, ...]
    overlaps: bool
    memory_bytes: int
    imbalance: float
    fits: bool | None
    candidates: int = 1
    plan: NetworkPlan | None = None

    @property
    def is_total(self) -> bool:
        """Whether every rank was rehearsed."""
        return len(self.rehearsed) == prod(self.grid)

    @property
    def all_messages(self) -> int:
        return self._of_all([r.messages for r in self.rehearsed])

    @property
    def all_message_bytes(self) -> int:
        return self._of_all([r.message_bytes for r in self.rehearsed])

    @property
    def seconds(self) -> float:
        """Predicted seconds of forward and backward."""
        return self.slowest.seconds(self.overlaps)

    @property
    def memory(self) -> Memory:
        """Memory of the rank that needs the most."""
        return max((r.memory for r in self.rehearsed), key=lambda memory: memory.total)

    def _of_all(self, counts: Sequence[int]) -> int:
        return sum(counts) if self.is_total else max(counts) * prod(self.grid)


@checked()
def plan(
    network: nn.Module | Sequence[nn.Module],
    global_shape: Sequence[int] | torch.Tensor | Sequence[Sequence[int] | torch.Tensor],
    ranks: int,
    profile: str | Path | Profile = "h100",
    *,
    best: int | None = None,
    replicate_parameters: bool = True,
    optimizer: str = "adam",
    recompute: bool = False,
    amp: torch.dtype | None = None,
    every_rank: bool = False,
    plan: NetworkPlan | None = None,
    grid: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[Advice]:
    """Rank the Cartesian partitions of a network's input, with the fastest planned step first.

    The network is converted for ranks of each partition, and runs forward and backward on tensors
    without data. Messages and bytes are those of the real plans; times are predicted from the
    profile. No other process is needed, no weight is copied, and no tensor is allocated.

    Args:
        network: network of torch modules, or a list of layers called one after the other.
        global_shape: global shape of its input, or a tensor that has the shape and dtype; of
            several inputs, a list of these.
        ranks: number of workers, all of which are used.
        profile: profile of the machine: ``"h100"``, ``"h200"``, ``"a100"``, ``"pcie"``, or a file
            that ``gpudist bench profile`` wrote.
        best: number of partitions to plan, chosen by a quick estimate; by default 8, or all for at
            most 4 ranks.
        replicate_parameters: see :func:`gpudist.distribute`.
        optimizer: ``"adam"``, ``"adamw"``, ``"momentum"``, ``"rmsprop"`` or ``"sgd"``.
        recompute: whether every block of the network is recomputed; see :func:`recompute`.
        amp: ``torch.bfloat16`` or ``torch.float16`` for forwards under autocast.
        every_rank: whether to rehearse all ranks of each partition, for exact totals; otherwise one
            or two ranks represent all, if there are more than 4.
        plan: edits of the network, which are planned in addition, on ``grid``.
        grid: partition of the input for ``plan``; by default the one it was searched on, or the
            fastest one without edits.
        progress: function called with the next item, the number of finished items, and the total.

    Returns:
        At most ``best`` of ``candidates`` partitions, and the one with ``plan``. Those that need
        more memory than the profile has are at the end.

    Cost:
        For each partition, one step without data per rehearsed rank.

    Raises:
        ShapeError: if the network cannot be converted for any partition; the error says why.
        GpudistError: if it cannot be converted with ``plan``.
    """
    if not isinstance(profile, Profile):
        profile = profile_of(profile)
    if ranks < 1 or (best is not None and best < 1):
        asked = f"{ranks} ranks" if ranks < 1 else f"the best {best} partitions"
        raise ShapeError(f"planning needs at least one rank and one partition, not {asked}")
    if progress is not None:
        progress("dims that can be cut", 0, 1)
    how = replicate_parameters, optimizer, recompute, amp
    dry = dry_network(network, global_shape, profile, *how)
    edited = None
    if plan is not None and grid is None:
        grid = plan.grid
    if plan is not None and grid is not None:
        if prod(grid) != ranks or len(grid) != len(dry.global_shape):
            raise ShapeError(
                f"the grid {list(grid)} of the plan does not split an input of "
                f"{len(dry.global_shape)} dims over {ranks} ranks; give one number per dim, whose "
                f"product is {ranks}"
            )
        edited = advice_on(dry, grid, every_rank, plan)
    advice = rank_grids(dry, ranks, best, every_rank, progress)
    if plan is not None:
        advice.append(edited or advice_on(dry, advice[0].grid, every_rank, plan))
    candidates = advice[0].candidates
    return sorted((replace(entry, candidates=candidates) for entry in advice), key=order)


def rank_grids(
    dry: DryNetwork, ranks: int, best: int | None = None, every_rank: bool = False,
    progress: Progress | None = None, wanted: int | None = None,
) -> list[Advice]:  # fmt: skip
    """Rank the partitions of the input over ``ranks`` workers, as :func:`plan` does.

    Args:
        dry: the network.
        ranks: number of workers.
        best, every_rank, progress: as for :func:`plan`.
        wanted: number of partitions that the caller needs of the planned ones. The others are given
            up at the first rank that shows that they are not among them.

    Raises:
        ShapeError: the network cannot be converted for any partition.
    """
    refusals: dict[int, str] = {}
    axes = axes_of(dry, refusals)
    candidate_grids = sorted(grids(ranks, dry.global_shape, axes), key=lambda g: estimate_s(dry, g))
    if best is None and ranks > 4:
        best = 8
    most = len(candidate_grids) if best is None else min(best, len(candidate_grids))
    advice: list[Advice] = []
    planned = 0
    reasons = [f"dim {axis} cannot be cut: {reason}" for axis, reason in refusals.items()]
    for candidate in candidate_grids:
        if planned >= most:
            break
        if progress is not None:
            progress(str(list(candidate)), planned, most)
        limit_s = inf
        if wanted is not None and len(advice) == wanted:
            limit_s = seconds_to_beat(advice[-1])
        try:
            entry = advice_below(dry, candidate, limit_s, every_rank)
        except GpudistError as error:
            reasons.append(f"{list(candidate)}: {error}")
            continue
        planned += 1
        if entry is not None:
            advice = sorted([*advice, entry], key=order)[:wanted]
    if not advice:
        raise ShapeError(
            f"no partition of {list(dry.global_shape)} over {ranks} ranks: "
            + ("; ".join(reasons) or _too_many(ranks, [dry.global_shape[axis] for axis in axes]))
        )
    candidates = len(candidate_grids) - (len(reasons) - len(refusals))
    if progress is not None:
        progress("", most, most)
    return [replace(entry, candidates=candidates) for entry in advice]


def seconds_to_beat(advice: Advice) -> float:
    """Return the seconds from which on no other advice comes before ``one`` in their order."""
    return inf if advice.fits is False else advice.seconds


def order(advice: Advice) -> tuple[bool, float]:
    """Key of sorting: partitions that fit come first, the fastest first."""
    return advice.fits is False, advice.seconds


def dry_network(
    network: nn.Module | Sequence[nn.Module],
    global_shape: Any,
    profile: Profile,
    replicate_parameters: bool,
    optimizer: str,
    is_recomputed: bool,
    amp: torch.dtype | None,
) -> DryNetwork:
    """Return the network without data, after a check of the arguments.

    Raises:
        ShapeError: an argument is wrong.
    """
    if not isinstance(network, nn.Module):
        network = nn.Sequential(*network)
    if optimizer not in OPTIMIZERS:
        raise ShapeError(f"no optimizer {optimizer!r}; the planner has {', '.join(OPTIMIZERS)}")
    if amp not in (None, *LOW):
        raise ShapeError(f"amp is {amp}; pass torch.bfloat16, torch.float16 or None")
    shapes = global_shape
    if isinstance(shapes, torch.Tensor) or all(isinstance(n, int) for n in shapes):
        shapes = [shapes]
    for x in shapes:
        shape = list(x.shape if isinstance(x, torch.Tensor) else x)
        if not shape or min(shape) < 1:
            raise ShapeError(f"the input of shape {shape} has no cells; give positive extents")
    if is_recomputed:
        network = recomputed(without_cells(network))
    first, *others = shapes
    return DryNetwork(network, first, profile, replicate_parameters, optimizer, others, amp)


def advice_on(
    dry: DryNetwork,
    grid: Sequence[int],
    every_rank: bool = False,
    plan: NetworkPlan | None = None,
) -> Advice:
    """Predict the cost of a step on one partition, of a network that follows ``plan`` if given.

    Raises:
        GpudistError: if the network cannot be converted for it.
    """
    advice = advice_below(dry, grid, inf, every_rank, plan)
    assert advice is not None
    return advice


def advice_below(
    dry: DryNetwork,
    grid: Sequence[int],
    limit_s: float,
    every_rank: bool = False,
    plan: NetworkPlan | None = None,
    first: int | None = None,
) -> Advice | None:
    """Predict the cost of a step as :func:`advice_on`, if no rank takes ``limit_s`` or longer.

    Args:
        dry: the network.
        grid: shape of the partition of the input.
        limit_s: seconds of the slowest rank at which the partition is given up.
        every_rank: whether to rehearse all ranks.
        plan: edits that the network follows.
        first: rank to rehearse first if it is among the rehearsed ones, such as the one that was
            the slowest before.

    Returns:
        The cost; ``None`` if a rank takes too long, after which no further rank is rehearsed.

    Raises:
        GpudistError: if the network cannot be converted for it.
    """
    grid = tuple(grid)
    overlaps = dry.profile.overlaps
    chosen = range(prod(grid)) if every_rank else representative_ranks(dry, grid, plan)
    rehearsals: dict[int, Rehearsal] = {}
    for rank in sorted(chosen, key=lambda other: other != first):
        rehearsals[rank] = dry.rehearse(grid, rank, plan)
        if rehearsals[rank].seconds(overlaps) >= limit_s:
            return None
    rehearsed = tuple(rehearsals[rank] for rank in chosen)
    slowest = max(rehearsed, key=lambda r: r.seconds(overlaps))
    memory_bytes = max(r.memory.total for r in rehearsed)
    limit = dry.profile.memory_gib * 2**30
    fits = memory_bytes <= limit if limit else None
    uneven = imbalance(dry, grid)
    return Advice(grid, slowest, rehearsed, overlaps, memory_bytes, uneven, fits, plan=plan)


def _too_many(ranks: int, extents: Sequence[int]) -> str:
    return (
        f"{ranks} is not a product of one factor per dim that can be cut, each at most the dim's "
        f"extent, and these are {list(extents)}; use another number of ranks"
    )


def axes_of(dry: DryNetwork, refusals: dict[int, str]) -> list[int]:
    """Return the dims that can be cut, found by trying each on two workers."""
    axes: list[int] = []
    shape = dry.global_shape
    for axis, extent in enumerate(shape):
        if extent < 2:
            continue
        grid = [2 if d == axis else 1 for d in range(len(shape))]
        try:
            dry.require_forward(grid)
        except GpudistError as error:
            refusals[axis] = str(error)
        else:
            axes.append(axis)
    return axes
