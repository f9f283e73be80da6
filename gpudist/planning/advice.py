"""The best partitions of a network on a machine, with what each of them costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import nn

from gpudist.checks.arguments import Checked, checked
from gpudist.errors import GpudistError, ShapeError
from gpudist.planning.grids import Grid, estimate_s, grids, imbalance, spread_ranks
from gpudist.planning.hardware import Profile, profile_of
from gpudist.planning.rehearsal import Memory, Rehearsal, Stage

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Advice(Checked):
    """What a training step costs on one partition.

    Attributes:
        grid: shape of the partition of the input.
        slowest: of the ranks that were rehearsed, the one that takes longest.
        rehearsed: all of them.
        overlaps: whether the machine carries messages beside kernels.
        memory_bytes: of the rank that holds most.
        imbalance: cells of layers' inputs on the rank that has most, over the mean of all ranks.
        fits: whether the memory is that of the profile or less; ``None`` where it has none.
        all_messages, all_message_bytes: what all ranks send in a step, if all were rehearsed; else
            at most so much: as if every rank sent what the busiest of them does.
    """

    grid: Grid
    slowest: Rehearsal
    rehearsed: tuple[Rehearsal, ...]
    overlaps: bool
    memory_bytes: int
    imbalance: float
    fits: bool | None

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
        """Predicted, of forward and backward."""
        return self.slowest.seconds(self.overlaps)

    @property
    def memory(self) -> Memory:
        """Of the rank that holds most."""
        return max((r.memory for r in self.rehearsed), key=lambda memory: memory.total)

    def _of_all(self, counts: Sequence[int]) -> int:
        return sum(counts) if self.is_total else max(counts) * prod(self.grid)


@checked()
def plan(
    network: nn.Module | Sequence[nn.Module],
    global_shape: Sequence[int],
    ranks: int,
    profile: str | Path | Profile = "h100",
    *,
    best: int | None = None,
    replicate_parameters: bool = True,
    optimizer_slots: int = 2,
    every_rank: bool = False,
    progress: Progress | None = None,
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
        every_rank: rehearse all ranks of each partition, for exact totals; else of more than 4
            ranks one or two.
        progress: is told what is planned next, how much is done, and of how much.

    Returns:
        At most ``best`` of them; those that need more memory than the profile has, last.

    Cost:
        Of each partition, a step of each rank that is rehearsed, without the cells.

    Raises:
        ShapeError: on no partition can the network be converted; says why.
    """
    if not isinstance(network, nn.Module):
        network = nn.Sequential(*network)
    if not isinstance(profile, Profile):
        profile = profile_of(profile)
    if ranks < 1 or (best is not None and best < 1):
        asked = f"{ranks} ranks" if ranks < 1 else f"the best {best} partitions"
        raise ShapeError(f"a network is planned for at least one rank and partition, not {asked}")
    if optimizer_slots < 0:
        raise ShapeError(
            f"an optimizer keeps 0 or more tensors of each parameter, not {optimizer_slots}"
        )
    if not global_shape or min(global_shape) < 1:
        raise ShapeError(f"a network is planned for an input with cells, not {list(global_shape)}")
    stage = Stage(network, global_shape, profile, replicate_parameters, optimizer_slots)
    refusals: dict[int, str] = {}
    axes = _axes(stage, refusals)
    found = sorted(grids(ranks, stage.global_shape, axes), key=lambda g: estimate_s(stage, g))
    if best is None and ranks > 4:
        best = 8
    most = len(found) if best is None else min(best, len(found))
    advice: list[Advice] = []
    reasons = [f"dim {axis} cannot be cut: {reason}" for axis, reason in refusals.items()]
    for grid in found:
        if len(advice) >= most:
            break
        if progress is not None:
            progress(str(list(grid)), len(advice), most)
        try:
            advice.append(advice_on(stage, grid, every_rank))
        except GpudistError as error:
            reasons.append(f"{list(grid)}: {error}")
    if progress is not None:
        progress("", most, most)
    if not advice:
        raise ShapeError(
            f"no partition of {list(stage.global_shape)} over {ranks} ranks: "
            + ("; ".join(reasons) or "no dims have so many cells")
        )
    return sorted(advice, key=lambda a: (a.fits is False, a.seconds))


def advice_on(stage: Stage, grid: Sequence[int], every_rank: bool = False) -> Advice:
    """What a step costs on one partition.

    Raises:
        GpudistError: the network cannot be converted for it.
    """
    grid = tuple(grid)
    chosen = range(prod(grid)) if every_rank else spread_ranks(stage, grid)
    rehearsed = tuple(stage.rehearse(grid, rank) for rank in chosen)
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
