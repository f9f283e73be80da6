"""The best partitions of a network on a machine, with what each of them costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import nn

from gpudist.errors import GpudistError, ShapeError
from gpudist.planning.grids import Grid, estimate_s, grids, imbalance, spread_ranks
from gpudist.planning.hardware import Profile, profile_of
from gpudist.planning.rehearsal import Memory, Rehearsal, Stage


@dataclass(frozen=True)
class Advice:
    """What a training step costs on one partition.

    Attributes:
        grid: shape of the partition of the input.
        slowest: of the ranks that were rehearsed, the one that takes longest.
        rehearsed: all of them.
        overlaps: whether the machine carries messages beside kernels.
        memory_bytes: of the rank that holds most.
        imbalance: cells of layers' inputs on the rank that has most, over the mean of all ranks.
        fits: whether the memory is that of the profile or less; ``None`` where it has none.
    """

    grid: Grid
    slowest: Rehearsal
    rehearsed: tuple[Rehearsal, ...]
    overlaps: bool
    memory_bytes: int
    imbalance: float
    fits: bool | None

    @property
    def seconds(self) -> float:
        """Predicted, of forward and backward."""
        return self.slowest.seconds(self.overlaps)

    @property
    def memory(self) -> Memory:
        """Of the rank that holds most."""
        return max((r.memory for r in self.rehearsed), key=lambda memory: memory.total)


def plan(
    network: nn.Module | Sequence[nn.Module],
    global_shape: Sequence[int],
    ranks: int,
    profile: str | Path | Profile = "h100",
    *,
    best: int | None = None,
    replicate_parameters: bool = True,
    optimizer_slots: int = 2,
) -> list[Advice]:
    """The Cartesian partitions of the input of a network, the fastest training step first.

    The network is converted for ranks of each partition and steps through forward and backward on
    tensors without cells: messages and bytes are those of the real plans. Times are predicted from
    the profile. No other process is needed, no weight is copied, and nothing is allocated.

    Args:
        network: of modules of torch, or a list of layers called one after the other.
        global_shape: of its one input.
        ranks: workers to share it, all of which are used.
        profile: of the machine: ``"h100"``, ``"h200"``, ``"a100"``, ``"pcie"``, or a file that
            ``gpudist bench profile`` wrote.
        best: of the partitions that a quick estimate finds best, how many to plan; 8 unless given,
            and all of up to 4 ranks.
        replicate_parameters: as of :func:`gpudist.distribute`.
        optimizer_slots: tensors that the optimizer keeps of each parameter.

    Returns:
        At most ``best`` of them; those that need more memory than the profile has, last.

    Cost:
        Of each partition, a step of one or two ranks (of all, up to 4), without the cells.

    Raises:
        ShapeError: on no partition can the network be converted; says why.
    """
    if not isinstance(network, nn.Module):
        network = nn.Sequential(*network)
    if not isinstance(profile, Profile):
        profile = profile_of(profile)
    if ranks < 1:
        raise ShapeError(f"a network is planned for at least one rank, not {ranks}")
    stage = Stage(network, global_shape, profile, replicate_parameters, optimizer_slots)
    refusals: dict[int, str] = {}
    axes = _axes(stage, refusals)
    found = sorted(grids(ranks, stage.global_shape, axes), key=lambda g: estimate_s(stage, g))
    if best is None and ranks > 4:
        best = 8
    advice: list[Advice] = []
    reasons = [f"dim {axis} cannot be cut: {reason}" for axis, reason in refusals.items()]
    for grid in found:
        if best is not None and len(advice) >= best:
            break
        try:
            advice.append(advice_on(stage, grid))
        except GpudistError as error:
            reasons.append(f"{list(grid)}: {error}")
    if not advice:
        raise ShapeError(
            f"no partition of {list(stage.global_shape)} over {ranks} ranks: "
            + ("; ".join(reasons) or "no dims have so many cells")
        )
    return sorted(advice, key=lambda a: (a.fits is False, a.seconds))


def advice_on(stage: Stage, grid: Sequence[int]) -> Advice:
    """What a step costs on one partition.

    Raises:
        GpudistError: the network cannot be converted for it.
    """
    grid = tuple(grid)
    rehearsed = tuple(stage.rehearse(grid, rank) for rank in spread_ranks(stage, grid))
    overlaps = stage.profile.overlaps
    slowest = max(rehearsed, key=lambda r: r.seconds(overlaps))
    memory_bytes = max(r.memory.total for r in rehearsed)
    limit = stage.profile.memory_gib * 2**30
    fits = memory_bytes <= limit if limit else None
    uneven = imbalance(stage, grid)
    return Advice(grid, slowest, rehearsed, overlaps, memory_bytes, uneven, fits)


def _axes(stage: Stage, refusals: dict[int, str]) -> list[int]:
    """The dims that may be cut at all: tried on two workers."""
    axes: list[int] = []
    shape = stage.global_shape
    for axis, extent in enumerate(shape):
        if extent < 2:
            continue
        grid = [2 if d == axis else 1 for d in range(len(shape))]
        assert prod(grid) == 2
        try:
            stage.rehearse(grid, 0)
        except GpudistError as error:
            refusals[axis] = str(error)
        else:
            axes.append(axis)
    return axes
