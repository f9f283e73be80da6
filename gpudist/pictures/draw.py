"""``gpudist.draw``: draw a partition and a movement on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpudist.checks.arguments import checked
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.windows import HaloWidths, Window
from gpudist.pictures.ghosts import ghosts_panel
from gpudist.pictures.maps import messages_panel, owners_panel
from gpudist.pictures.matrix import matrix_panel
from gpudist.pictures.page import Panel, bytes_text, figure_of, require_matplotlib
from gpudist.pictures.scene import (
    Scene,
    StageTraffic,
    busiest,
    halo_scene,
    partition_scene,
    repartition_scene,
    traffic,
)
from gpudist.world.partition import Partition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Grid = Partition | Sequence[int]


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


def scene_of(
    shape: Sequence[int],
    P_x: Grid,
    P_y: Grid | None = None,
    window: Sequence[Window] | None = None,
    halo: Sequence[tuple[int, int]] | None = None,
    periodic: Sequence[bool] | bool = False,
    nested: bool = False,
) -> Scene:
    """Create the scene for :func:`draw` from the same arguments."""
    movements = [value for value in (P_y, window, halo) if value is not None]
    if len(movements) > 1:
        raise ShapeError(
            "draw: more than one of P_y, window and halo is given; a picture shows one movement, "
            "so pass one"
        )
    grid, ranks = _grid(P_x)
    if P_y is not None:
        target, target_ranks = _grid(P_y)
        return repartition_scene(shape, grid, target, ranks, target_ranks)
    windows = window if halo is None else [HaloWidths(*widths) for widths in halo]
    if windows is None:
        return partition_scene(shape, grid, ranks)
    return halo_scene(shape, grid, windows, periodic, nested, ranks)


def draw_scene(
    scene: Scene, rank: int | None = None, dims: Sequence[int] | None = None, itemsize: int = 4
) -> Figure:
    """Draw ``scene``; for the arguments see :func:`draw`."""
    if itemsize < 1:
        raise ShapeError(f"itemsize is {itemsize}; a cell must have at least one byte")
    drawn = _choose_dims(scene, dims)
    panels = _owners(scene, drawn)
    if scene.plans:
        shown = choose_rank(scene, rank)
        if scene.ghosts:
            panels.append(ghosts_panel(scene, drawn, shown))
        for number, moved in enumerate(traffic(scene)):
            panels += _stage_panels(scene, drawn, shown, number, moved, itemsize)
    return figure_of(panels, _title(scene))


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure to a file; equal figures give equal bytes.

    Raises:
        ShapeError: if the suffix does not name a format that can be written.
        OSError: if the file cannot be written.
    """
    import matplotlib

    require_picture(path)
    suffix = Path(path).suffix.lower()
    undated = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    with matplotlib.rc_context({"svg.hashsalt": "gpudist"}):
        figure.savefig(path, dpi=120, metadata=undated)


def require_picture(path: str | Path) -> None:
    """Check that a picture can be written to ``path``.

    Raises:
        ShapeError: if the suffix does not name a format that can be written.
        NotBuiltError: if matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ShapeError(f"{path}: the suffix of a picture must be .png, .svg or .pdf")
    require_matplotlib()


def choose_rank(scene: Scene, name: int | None) -> int:
    """Return the rank in the scene with world rank ``name``; the busiest rank if ``None``."""
    if name is None:
        return busiest(scene)
    if name not in scene.names:
        raise PartitionError(f"rank {name} is not in the picture; use one of {list(scene.names)}")
    return scene.names.index(name)


def _grid(grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    if isinstance(grid, Partition):
        return tuple(grid.shape), tuple(grid.ranks)
    if not grid or min(grid) < 1:
        raise PartitionError(f"a grid of shape {list(grid)} has no workers")
    return tuple(grid), None


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


def _owners(scene: Scene, dims: tuple[int, ...]) -> list[Panel]:
    if scene.movement != "repartition":
        title = "Who owns which box"
        return [owners_panel(scene.source, dims, scene.source_ranks, scene.names, title)]
    return [
        owners_panel(cut, dims, ranks, scene.names, title)
        for cut, ranks, title in (
            (scene.source, scene.source_ranks, "Who owns which box before"),
            (scene.target, scene.target_ranks, "Who owns which box after"),
        )
    ]


def _stage_panels(
    scene: Scene,
    dims: tuple[int, ...],
    rank: int,
    number: int,
    moved: StageTraffic,
    itemsize: int,
) -> list[Panel]:
    words = f"Stage {number + 1} of {scene.stages}"
    total = bytes_text(moved.total_cells * itemsize)
    matrix = matrix_panel(
        moved, scene.names, itemsize,
        f"{words}: bytes from whom to whom; {moved.messages} messages, {total} in all",
    )  # fmt: skip
    if number >= len(scene.plans[rank].stages):
        return [matrix]
    stage = scene.plans[rank].stages[number]
    of_rank = f"{words}: what rank {scene.names[rank]}"
    maps = [("exchanges, in cells", scene.source, scene.source_ranks, stage)]
    if scene.movement == "repartition":
        maps = [
            ("receives, in cells", scene.source, scene.source_ranks, replace(stage, sends=())),
            ("sends, in cells", scene.target, scene.target_ranks, replace(stage, receives=())),
        ]
    return [
        messages_panel(cut, dims, ranks, scene.names, rank, part, f"{of_rank} {verb}")
        for verb, cut, ranks, part in maps
    ] + [matrix]


def _title(scene: Scene) -> str:
    shape, grid = list(scene.source.shape), list(scene.source.grid)
    if scene.movement == "repartition":
        return f"Repartition of {shape} from {grid} to {list(scene.target.grid)}"
    movement = f"{scene.movement.capitalize()} of" if scene.movement else "A tensor of shape"
    return f"{movement} {shape} over {grid}"
