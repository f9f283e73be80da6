"""Scene of a picture: a tensor's decomposition and the plans of all ranks, in integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Plan
from gpudist.geometry.cartesian import index_of, rank_of, size_of
from gpudist.geometry.halo import Halo, halo_of, plan_halo
from gpudist.geometry.repartition import plan_repartition
from gpudist.geometry.windows import Window
from gpudist.world.partition import Partition

MAX_RANKS = 512

Grid = Partition | Sequence[int]
# Number of cells in each message of a stage, by sender and receiver.
Traffic = dict[tuple[int, int], int]


@dataclass(frozen=True)
class Scene:
    """Decomposition of a tensor, and a movement of it.

    ``plans``, ``source_ranks`` and ``target_ranks`` number the ranks from 0 in the same way.

    Attributes:
        source, target: decompositions of input and output; the same for a halo exchange.
        source_ranks, target_ranks: rank at each place of either grid, row-major.
        names: world rank of each rank, shown in the picture.
        title: title of the picture.
        plans: plans of the movement, by rank; empty without a movement.
        halo: options of the halo exchange; ``None`` for another movement.
    """

    source: Decomposition
    target: Decomposition
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    names: tuple[int, ...]
    title: str
    plans: tuple[Plan, ...] = ()
    halo: Halo | None = None


def scene_of(
    shape: Sequence[int],
    P_x: Grid,
    P_y: Grid | None = None,
    window: Sequence[Window] | None = None,
    halo: Sequence[tuple[int, int]] | None = None,
    periodic: Sequence[bool] | bool = False,
    nested: bool = False,
) -> Scene:
    """Create the scene for :func:`gpudist.draw` from the same arguments."""
    if sum(movement is not None for movement in (P_y, window, halo)) > 1:
        raise ShapeError(
            "draw: more than one of P_y, window and halo is given; a picture shows one movement, "
            "so pass one"
        )
    grid, of_source = _grid(P_x)
    target_grid, of_target = (grid, of_source) if P_y is None else _grid(P_y)
    names = of_source if P_y is None else sorted({*of_source, *of_target})
    if len(names) > MAX_RANKS:
        raise PartitionError(
            f"draw: a picture of {len(names)} ranks cannot be read; draw at most {MAX_RANKS}, such "
            "as one corner of the grid and of the tensor"
        )
    number = {name: rank for rank, name in enumerate(names)}
    scene = Scene(
        Decomposition.balanced(shape, grid),
        Decomposition.balanced(shape, target_grid),
        tuple(number[name] for name in of_source),
        tuple(number[name] for name in of_target),
        tuple(names),
        f"A tensor of shape {list(shape)} over {list(grid)}",
    )
    if P_y is not None:
        title = f"Repartition of {list(shape)} from {list(grid)} to {list(target_grid)}"
        return replace(scene, title=title, plans=_repartition_plans(scene))
    if window is None and halo is None:
        return scene
    moved = halo_of("draw", len(shape), window, halo, periodic, nested)
    plans = (plan_halo(scene.source, moved, index_of(r, grid)) for r in scene.source_ranks)
    title = f"Halo exchange of {list(shape)} over {list(grid)}"
    return replace(scene, title=title, plans=tuple(plans), halo=moved)


def traffic(scene: Scene) -> list[Traffic]:
    """Return the messages of each stage, from the sends of the plans."""
    stages: list[Traffic] = [{} for plan in scene.plans[:1] for _ in plan.stages]
    for plan in scene.plans:
        for cells, stage in zip(stages, plan.stages, strict=True):
            cells.update({(plan.rank, sent.peer): sent.volume for sent in stage.sends})
    return stages


def choose_rank(scene: Scene, name: int | None) -> int:
    """Return the rank with world rank ``name``.

    Without a name, return the rank that receives the most messages; among equals, the middle one.
    """
    if name is not None:
        if name not in scene.names:
            raise PartitionError(
                f"rank {name} is not in the picture; use one of {list(scene.names)}"
            )
        return scene.names.index(name)
    received = Counter(receiver for stage in traffic(scene) for _, receiver in stage)
    most = max(received.values(), default=0)
    busiest = [rank for rank in range(len(scene.names)) if received[rank] == most]
    return busiest[len(busiest) // 2]


def _grid(grid: Grid) -> tuple[tuple[int, ...], Sequence[int]]:
    if isinstance(grid, Partition):
        return tuple(grid.shape), grid.ranks
    if not grid or min(grid) < 1:
        raise PartitionError(f"a grid of shape {list(grid)} has no workers")
    return tuple(grid), range(size_of(grid))


def _repartition_plans(scene: Scene) -> tuple[Plan, ...]:
    source, target = scene.source, scene.target
    owners, receivers = (
        {rank: index_of(place, cut.grid) for place, rank in enumerate(ranks)}
        for cut, ranks in ((source, scene.source_ranks), (target, scene.target_ranks))
    )
    return tuple(
        plan_repartition(
            source, target, rank, owners.get(rank), receivers.get(rank),
            lambda index: scene.source_ranks[rank_of(index, source.grid)],
            lambda index: scene.target_ranks[rank_of(index, target.grid)],
        )
        for rank in range(len(scene.names))
    )  # fmt: skip
