"""Draw one rank's block and its ghosts, coloured by owner. Not to scale."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from gpudist.geometry.boxes import Box, Plan, boxes_outside
from gpudist.geometry.cartesian import index_of
from gpudist.pictures.maps import color_at
from gpudist.pictures.page import WIDEST_PANEL_IN, Panel, box, label
from gpudist.pictures.scene import Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GHOST_IN, OWN_IN = 0.5, 1.0
MARGIN_IN = 0.6
CAPTION_IN = 0.25


def ghosts_panel(scene: Scene, dims: tuple[int, ...], rank: int) -> Panel:
    """Return a panel of the cells that ``rank`` needs, coloured by owner; padding is grey."""
    plan, first = scene.ghosts[rank], scene.needed[rank]
    parts = _parts(scene, plan)
    shape = plan.output_shape or ()
    steps = [_Steps.of(parts, shape, d) for d in dims]
    title = f"Rank {scene.names[rank]}'s block with its ghosts, and who owns them (not to scale)"
    if not parts:
        return Panel(f"{title}: it needs nothing", 1.0, 0.2, lambda axes: None)
    columns = steps[-1]
    rows = steps[-2] if len(dims) > 1 else _Steps((0, 1), (OWN_IN,))
    slices = steps[0] if len(dims) == 3 else _Steps((0, 1), (OWN_IN,))
    left, top = (MARGIN_IN, CAPTION_IN if len(dims) == 3 else 0.0)
    pitch = left + columns.length_in + 0.35, top + rows.length_in + 0.35
    count = len(slices.edges) - 1
    on_a_line = max(1, min(count, int(WIDEST_PANEL_IN / pitch[0])))

    def paint(axes: Axes) -> None:
        for number, (low, high) in enumerate(pairwise(slices.edges)):
            line, place = divmod(number, on_a_line)
            origin = (place * pitch[0] + left, line * pitch[1] + top)
            if len(dims) == 3:
                text = f"dim {dims[0]}: {low + first[dims[0]]}:{high + first[dims[0]]}"
                at = (origin[0] + columns.length_in / 2, origin[1] - top + 0.1)
                label(axes, at, (pitch[0], 0.21), text, weight="bold")
            for cells, owner in parts:
                if len(dims) < 3 or cells.start[dims[0]] <= low < cells.stop[dims[0]]:
                    _paint_part(axes, scene, owner, cells, dims, origin, rows, columns)
            _paint_edges(axes, first, dims, origin, rows, columns)

    return Panel(title, on_a_line * pitch[0], -(-count // on_a_line) * pitch[1], paint)


class _Steps:
    """Edges of the boxes along a dim, in inches: own cells wide, ghosts narrow."""

    def __init__(self, edges: Sequence[int], widths_in: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.at_in = [sum(widths_in[:i]) for i in range(len(edges))]

    @classmethod
    def of(cls, parts: Sequence[tuple[Box, int | None]], shape: Sequence[int], dim: int) -> _Steps:
        edges = sorted({0, shape[dim], *(e for b, _ in parts for e in (b.start[dim], b.stop[dim]))})
        longest = max((b - a for a, b in pairwise(edges)), default=0)
        widths = [OWN_IN if b - a == longest else GHOST_IN for a, b in pairwise(edges)]
        return cls(edges, widths)

    @property
    def length_in(self) -> float:
        return self.at_in[-1]

    def place(self, start: int, stop: int) -> tuple[float, float]:
        """Return start and length of a range, in inches."""
        low, high = self.at_in[self.edges.index(start)], self.at_in[self.edges.index(stop)]
        return low, high - low


def _parts(scene: Scene, plan: Plan) -> list[tuple[Box, int | None]]:
    parts: list[tuple[Box, int | None]] = []
    for stage in plan.stages:
        parts += [(move.destination, plan.rank) for move in stage.moves]
        parts += [(cells, m.peer) for m in stage.receives for cells in m.boxes]
    rest = boxes_outside(plan.output_shape or (), [cells for cells, _ in parts])
    return parts + [(cells, None) for cells in rest]


def _paint_part(
    axes: Axes,
    scene: Scene,
    owner: int | None,
    cells: Box,
    dims: tuple[int, ...],
    origin: tuple[float, float],
    rows: _Steps,
    columns: _Steps,
) -> None:
    x, width = columns.place(cells.start[dims[-1]], cells.stop[dims[-1]])
    y, height = (0.0, OWN_IN)
    if len(dims) > 1:
        y, height = rows.place(cells.start[dims[-2]], cells.stop[dims[-2]])
    corner, size = (origin[0] + x, origin[1] + y), (width, height)
    if owner is None:
        box(axes, corner, size, facecolor="0.93", hatch="////", edgecolor="0.75")
        return
    color = color_at(index_of(owner, scene.source.grid))
    box(axes, corner, size, facecolor=color)
    text = str(scene.names[owner])
    center = (corner[0] + width / 2, corner[1] + height / 2)
    label(axes, center, (width * 0.9, height * 0.9), text)


def _paint_edges(
    axes: Axes,
    first: Sequence[int],
    dims: tuple[int, ...],
    origin: tuple[float, float],
    rows: _Steps,
    columns: _Steps,
) -> None:
    """Write the global cell number at each edge."""
    for edge, x in zip(columns.edges, columns.at_in, strict=True):
        at = (origin[0] + x, origin[1] + rows.length_in + 0.2)
        label(axes, at, (GHOST_IN * 0.92, 0.2), str(edge + first[dims[-1]]))
    if len(dims) > 1:
        for edge, y in zip(rows.edges, rows.at_in, strict=True):
            at = (origin[0] - 0.26, origin[1] + y)
            label(axes, at, (0.42, 0.2), str(edge + first[dims[-2]]))
