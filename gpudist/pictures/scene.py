"""Scene of a picture: a tensor's decomposition and the plans of all ranks, in integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Plan
from gpudist.geometry.cartesian import index_of, rank_of, size_of
from gpudist.geometry.halo import Halo, needed_range, plan_halo
from gpudist.geometry.repartition import plan_repartition
from gpudist.geometry.windows import Window

MAX_RANKS = 512


@dataclass(frozen=True)
class Scene:
    """Decomposition of a tensor, and a movement of it.

    ``plans``, ``source_ranks`` and ``target_ranks`` number the ranks from 0 in the same way.

    Attributes:
        source, target: decompositions of input and output; the same for a halo exchange.
        source_ranks, target_ranks: rank at each place of either grid, row-major.
        names: world rank of each rank, shown in the picture.
        plans: plans of the movement, by rank; empty without a movement.
        ghosts: single-stage plans, by rank, whose output is the block with its ghosts; empty if
            there are no ghosts.
        needed: first global cell, per dim, of each rank's block with its ghosts.
        movement: name of the movement.
    """

    source: Decomposition
    target: Decomposition
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    names: tuple[int, ...]
    plans: tuple[Plan, ...] = ()
    ghosts: tuple[Plan, ...] = ()
    needed: tuple[tuple[int, ...], ...] = ()
    movement: str = ""

    @property
    def stages(self) -> int:
        """Largest number of stages in any rank's plan."""
        return max((len(plan.stages) for plan in self.plans), default=0)


@dataclass(frozen=True)
class StageTraffic:
    """Messages that all ranks send in one stage.

    Attributes:
        cells: number of cells by sender and receiver, for pairs that exchange a message.
    """

    cells: dict[tuple[int, int], int]

    @property
    def messages(self) -> int:
        return len(self.cells)

    @property
    def total_cells(self) -> int:
        return sum(self.cells.values())


def partition_scene(
    shape: Sequence[int], grid: Sequence[int], ranks: Sequence[int] | None = None
) -> Scene:
    """Create a scene of the balanced blocks of a tensor of ``shape``, without a movement.

    Args:
        shape: shape of the global tensor.
        grid: number of workers along each dim.
        ranks: world ranks of the workers, row-major; ``None`` numbers them from 0.
    """
    cut = Decomposition.balanced(shape, grid)
    places = tuple(range(size_of(grid)))
    names = tuple(ranks) if ranks is not None else places
    _require_size(len(names))
    return Scene(cut, cut, places, places, names)


def halo_scene(
    shape: Sequence[int],
    grid: Sequence[int],
    windows: Sequence[Window],
    periodic: Sequence[bool] | bool = False,
    nested: bool = False,
    ranks: Sequence[int] | None = None,
) -> Scene:
    """Create a scene of a halo exchange of a balanced tensor.

    Args:
        shape, grid, ranks: see :func:`partition_scene`.
        windows: windows per dim, counted from the last dim.
        periodic: whether ranges beyond the edge wrap, per window.
        nested: whether there is one stage per dim, instead of one with all neighbours.

    Raises:
        ShapeError: if a window does not fit the tensor.
    """
    still = partition_scene(shape, grid, ranks)
    if len(windows) > len(still.source.dims):
        raise ShapeError(
            f"draw: {len(windows)} windows for a tensor with {len(shape)} dims; give at most one "
            "per dim"
        )
    wraps = (periodic,) * len(windows) if isinstance(periodic, bool) else tuple(periodic)
    if len(wraps) != len(windows):
        raise ShapeError(
            f"periodic has {len(wraps)} entries for {len(windows)} windows; give one per window, "
            "or a single bool"
        )
    halo = Halo(tuple(windows), wraps, nested).over(len(still.source.dims))
    indices = [index_of(rank, still.source.grid) for rank in still.source_ranks]
    direct, plans = (
        tuple(plan_halo(still.source, way, i) for i in indices)
        for way in (replace(halo, nested=False), halo)
    )
    return Scene(
        still.source, still.target, still.source_ranks, still.target_ranks, still.names,
        plans, direct, _first_needed(still.source, halo.windows, indices), "halo exchange",
    )  # fmt: skip


def repartition_scene(
    shape: Sequence[int],
    source_grid: Sequence[int],
    target_grid: Sequence[int],
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
) -> Scene:
    """Create a scene of the repartition of a balanced tensor from one grid to another.

    Args:
        shape: shape of the global tensor.
        source_grid, target_grid: number of workers along each dim, before and after.
        source_ranks, target_ranks: world ranks, row-major; ``None`` numbers them from 0.
    """
    source = Decomposition.balanced(shape, source_grid)
    target = Decomposition.balanced(shape, target_grid)
    of_source = tuple(source_ranks) if source_ranks is not None else range(size_of(source_grid))
    of_target = tuple(target_ranks) if target_ranks is not None else range(size_of(target_grid))
    names = tuple(sorted({*of_source, *of_target}))
    _require_size(len(names))
    number = {name: rank for rank, name in enumerate(names)}
    sources = tuple(number[name] for name in of_source)
    targets = tuple(number[name] for name in of_target)
    source_index = {rank: index_of(place, source.grid) for place, rank in enumerate(sources)}
    target_index = {rank: index_of(place, target.grid) for place, rank in enumerate(targets)}
    plans = tuple(
        plan_repartition(
            source, target, rank, source_index.get(rank), target_index.get(rank),
            lambda index: sources[rank_of(index, source.grid)],
            lambda index: targets[rank_of(index, target.grid)],
        )
        for rank in range(len(names))
    )  # fmt: skip
    return Scene(source, target, sources, targets, names, plans, movement="repartition")


def traffic(scene: Scene) -> tuple[StageTraffic, ...]:
    """Return the messages between ranks in each stage, from the sends of the plans."""
    by_stage: list[dict[tuple[int, int], int]] = [{} for _ in range(scene.stages)]
    for plan in scene.plans:
        for number, stage in enumerate(plan.stages):
            for message in stage.sends:
                by_stage[number][plan.rank, message.peer] = message.volume
    return tuple(StageTraffic(cells) for cells in by_stage)


def busiest(scene: Scene) -> int:
    """Return the rank that receives the most messages; among equals, the middle one."""
    received = [sum(len(stage.receives) for stage in plan.stages) for plan in scene.plans]
    most = [rank for rank, count in enumerate(received) if count == max(received)]
    return most[len(most) // 2] if most else 0


def _first_needed(
    cut: Decomposition, windows: Sequence[Window], indices: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(
            needed_range(blocks, window, i)[0]
            for blocks, window, i in zip(cut.dims, windows, index, strict=True)
        )
        for index in indices
    )


def _require_size(ranks: int) -> None:
    if ranks > MAX_RANKS:
        raise PartitionError(
            f"draw: a picture of {ranks} ranks cannot be read; draw at most {MAX_RANKS}, such as "
            "one corner of the grid and of the tensor"
        )
