"""``gpudist.draw``: draw a partition and a movement on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.windows import Window
from gpudist.pictures.page import figure_of, save, short
from gpudist.pictures.panels import ghosts_panel, map_panel, matrix_panel
from gpudist.pictures.scene import Grid, Scene, Traffic, choose_rank, scene_of, traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@checked()
def draw(
    shape: Sequence[int],
    P_x: Grid,
    P_y: Grid | None = None,
    *,
    window: Sequence[Window] | None = None,
    halo: Sequence[tuple[int, int]] | None = None,
    periodic: Sequence[bool] | bool = False,
    nested: bool = False,
    rank: int | None = None,
    dims: Sequence[int] | None = None,
    itemsize: int = 4,
    path: str | Path | None = None,
) -> Figure:
    """Draw the owners of the boxes of a tensor, and the messages of a movement.

    Not collective; the ranks in the picture need not exist.

    Args:
        shape: shape of the global tensor, which is cut into balanced blocks.
        P_x: partition, or shape of a grid whose ranks are numbered from 0.
        P_y: target partition or grid shape of a repartition.
        window: windows of a halo exchange: kernel, stride, dilation and padding per dim, in cells,
            counted from the last dim.
        halo: widths ``(left, right)`` of a halo exchange per dim, in cells, instead of ``window``.
        periodic: whether the halo wraps at the edges, per dim of ``window`` or ``halo``.
        nested: whether the halo exchange has one stage per dim.
        rank: world rank whose ghosts and messages are shown; the busiest rank if ``None``.
        dims: one to three dims of the tensor to draw; the partitioned dims if ``None``.
        itemsize: bytes of a cell.
        path: file to write; its suffix is ``.png``, ``.svg`` or ``.pdf``.

    Returns:
        A matplotlib figure.

    Raises:
        NotBuiltError: if matplotlib is not installed.
        PartitionError: the grid does not fit, has too many partitioned axes, or does not have the
            rank.
        ShapeError: if the window does not fit the tensor, both kinds of halo are given, or
            ``itemsize`` is less than 1.
    """
    scene = scene_of(shape, P_x, P_y, window, halo, periodic, nested)
    figure = draw_scene(scene, rank, dims, itemsize)
    if path is not None:
        save(figure, path)
    return figure


def draw_scene(
    scene: Scene, rank: int | None = None, dims: Sequence[int] | None = None, itemsize: int = 4
) -> Figure:
    """Draw ``scene``; for the arguments see :func:`draw`."""
    if itemsize < 1:
        raise ShapeError(f"itemsize is {itemsize}; a cell must have at least one byte")
    drawn, shown = _choose_dims(scene, dims), choose_rank(scene, rank)
    before, after = (scene.source, scene.source_ranks), (scene.target, scene.target_ranks)
    is_repartition = bool(scene.plans) and scene.halo is None
    owners = {" before": before, " after": after} if is_repartition else {"": before}
    panels = [
        map_panel(
            scene, workers, drawn, f"Who owns which box{when}: rank, and the cells of its block",
            dict.fromkeys(workers[1], ""),
        )
        for when, workers in owners.items()
    ]  # fmt: skip
    if scene.halo is not None:
        panels.append(ghosts_panel(scene, drawn, shown))
    maps = {"receives": (before, {"in": 1}), "sends": (after, {"out": 0})}
    if not is_repartition:
        maps = {"exchanges": (before, {"in": 1, "out": 0})}
    stages = traffic(scene)
    for number, moved in enumerate(stages):
        words = f"Stage {number + 1} of {len(stages)}"
        for verb, (workers, ends) in maps.items():
            title = f"{words}: what rank {scene.names[shown]} {verb}, in cells"
            texts = _message_texts(scene, moved, number, shown, ends)
            panels.append(map_panel(scene, workers, drawn, title, texts, shown))
        total = short(sum(moved.values()) * itemsize)
        title = (
            f"{words}: bytes from whom (down) to whom (across); {len(moved)} messages, "
            f"{total}B in all"
        )
        panels.append(matrix_panel(scene, moved, itemsize, title))
    return figure_of(panels, scene.title)


def _choose_dims(scene: Scene, asked: Sequence[int] | None) -> tuple[int, ...]:
    both = list(zip(scene.source.grid, scene.target.grid, strict=True))
    partitioned = [d for d, parts in enumerate(both) if max(parts) > 1]
    outside = [d for d in asked or () if not -len(both) <= d < len(both)]
    if outside:
        raise PartitionError(
            f"draw: dims {outside} are not among the {len(both)} dims of the tensor; give dims "
            f"from {-len(both)} to {len(both) - 1}"
        )
    dims = sorted({d % len(both) for d in asked}) if asked else partitioned or [len(both) - 1]
    missing = sorted(set(partitioned) - set(dims))
    if missing or len(dims) > 3:
        raise PartitionError(
            f"dims {partitioned} are partitioned, and a picture shows all of them and at most "
            f"three; asked for {dims}"
        )
    return tuple(dims)


def _message_texts(
    scene: Scene, moved: Traffic, stage: int, rank: int, ends: dict[str, int]
) -> dict[int, str]:
    """Return what ``rank`` keeps, and by peer its messages, which have it at the named ends."""
    kept = sum(move.destination.volume for move in scene.plans[rank].stages[stage].moves)
    texts = {rank: f"\nkeeps\n{short(kept)}"}
    for verb, end in ends.items():
        for pair, cells in moved.items():
            if pair[end] == rank:
                peer = pair[1 - end]
                texts[peer] = texts.get(peer, "") + f"\n{verb} {short(cells)}"
    return texts
