"""Panels of a scene: maps of the process grid, one rank's ghosts, and the matrix of a stage.

A panel is a table of boxes with a tile each, under a title.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import Box, boxes_outside
from gpudist.geometry.cartesian import index_of
from gpudist.geometry.halo import needed_range, plan_halo
from gpudist.pictures.page import Tile, bounds, flow, short, titled
from gpudist.pictures.scene import Scene, Traffic

# Width of a slot in a large map and in a small one, height by width, and width of a small map.
LEAST_SLOT_IN, MOST_SLOT_IN, SLOT_HEIGHT, SMALL_MAP_IN = 0.65, 1.05, 0.8, 2.4
# Share of a slot that a block without cells fills, and columns of a line.
LEAST_FILLED, MOST_COLUMNS = 0.6, 10
# Neighbours, including diagonal ones, have different colours.
COLORS = (
    *("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462"),
    *("#b3de69", "#fccde5", "#d9d9d9", "#d8a0d8", "#ccebc5", "#ffed6f"),
)
_COLOR_STEPS = (1, 5, 3, 7, 2)
GHOST_IN, OWN_IN = 0.5, 1.0
# Side of a square in a small matrix, least side, and width of a large matrix.
LARGE_IN, LEAST_IN, MATRIX_IN = 0.62, 0.012, 3.6
MATRIX_COLOR, WRITTEN_RANKS = (0.12, 0.35, 0.65), 8
LEAST_HEAD_IN = 0.3

# A decomposition, and the rank at each place of its grid, row-major.
Workers = tuple[Decomposition, Sequence[int]]
# Place of each edge along a dim of a table, in inches, and the head of each step.
Ruler = tuple[dict[int, float], Sequence[str]]


def color_at(index: Sequence[int]) -> str:
    """Return the colour of the worker at ``index`` of the grid."""
    number = sum(i * step for i, step in zip(reversed(index), _COLOR_STEPS, strict=False))
    return COLORS[number % len(COLORS)]


def map_panel(
    scene: Scene,
    workers: Workers,
    dims: Sequence[int],
    title: str,
    texts: Mapping[int, str],
    shown: int | None = None,
) -> list[Tile]:
    """Return a map of the process grid, on which blocks with fewer cells are smaller.

    Args:
        scene: scene of the picture.
        workers: the workers on the map.
        dims: dims that are drawn.
        title: title of the panel.
        texts: texts of the ranks that take part; others are white, and ranks without cells dashed.
        shown: rank with a thick edge.
    """
    cut, ranks = workers
    cells: list[tuple[Box, Tile]] = []
    for place, rank in enumerate(ranks):
        index = index_of(place, cut.grid)
        face = color_at(index) if rank in texts else "white"
        edge: dict[str, Any] = {"linewidth": 1.8} if rank == shown else {}
        if not cut.block(index).volume:
            face, edge = "none", {"linestyle": "--", "edgecolor": "0.6"}
        text = str(scene.names[rank]) + texts.get(rank, "")
        cells.append((Box(index, tuple(i + 1 for i in index)), Tile(text, face, edge=edge)))
    longest = max(cut.grid[d] for d in dims[-2:])
    width = min(MOST_SLOT_IN, max(LEAST_SLOT_IN, SMALL_MAP_IN / longest))
    sides = {dims[-1]: width, **dict.fromkeys(dims[-2:-1], width * SLOT_HEIGHT)}
    rulers: list[Ruler] = []
    for d in dims:
        blocks = cut.dims[d]
        side, most = sides.get(d, width), max(blocks.lengths)
        sizes = [side * (LEAST_FILLED + (1 - LEAST_FILLED) * n / most) for n in blocks.lengths]
        heads = [_range_text(*blocks.block(i)) for i in range(blocks.parts)]
        rulers.append(_ruler(range(blocks.parts + 1), sizes, heads))
    # A 1-d grid is a line, wrapped if it is long.
    step = MOST_COLUMNS if len(dims) == 1 else len(cells)
    lines = (cells[first : first + step] for first in range(0, len(cells), step))
    groups = [t for line in lines for t in _tables(line, dims, rulers, width * SLOT_HEIGHT, 0.92)]
    return titled(title, flow(groups, 0.2))


def ghosts_panel(scene: Scene, dims: Sequence[int], rank: int) -> list[Tile]:
    """Return the cells that ``rank`` needs, coloured by owner; padding is grey. Not to scale."""
    assert scene.halo is not None
    cut, index = scene.source, index_of(rank, scene.source.grid)
    plan = plan_halo(cut, replace(scene.halo, nested=False), index)
    (stage,) = plan.stages
    owners = [(move.destination, rank) for move in stage.moves]
    owners += [(cells, message.peer) for message in stage.receives for cells in message.boxes]
    padding = boxes_outside(plan.output_shape or (), [cells for cells, _ in owners])
    grey = Tile(face="0.93", edge={"hatch": "////", "edgecolor": "0.75"})
    parts = [(cells, grey) for cells in padding] + [
        (cells, Tile(str(scene.names[owner]), color_at(index_of(owner, cut.grid))))
        for cells, owner in owners
    ]
    title = f"Rank {scene.names[rank]}'s block with its ghosts, and who owns them (not to scale)"
    if not parts:
        return titled(f"{title}: it needs nothing", [])
    rulers: list[Ruler] = []
    for d in dims:
        first, _ = needed_range(cut.dims[d], scene.halo.windows[d], index[d])
        edges = sorted({edge for cells, _ in parts for edge in (cells.start[d], cells.stop[d])})
        steps = list(pairwise(edges))
        longest = max(high - low for low, high in steps)
        widths = [OWN_IN if high - low == longest else GHOST_IN for low, high in steps]
        heads = [_range_text(low + first, high + first) for low, high in steps]
        rulers.append(_ruler(edges, widths, heads))
    return titled(title, flow(_tables(parts, dims, rulers, OWN_IN)))


def matrix_panel(scene: Scene, moved: Traffic, itemsize: int, title: str) -> list[Tile]:
    """Return a square per sender (down) and receiver (across), darker for more bytes."""
    names, most = scene.names, max(moved.values(), default=0)
    ranks = len(names)
    cells = [(Box((0, 0), (ranks, ranks)), Tile(face="white"))]
    for (sender, receiver), count in moved.items():
        # Even small messages remain visible.
        strength = 0.15 + 0.85 * count / most
        face = tuple(1 - strength * (1 - channel) for channel in MATRIX_COLOR)
        text = short(count * itemsize) if ranks <= WRITTEN_RANKS else ""
        font = {"color": "white" if strength > 0.6 else "black"}
        square = Box((sender, receiver), (sender + 1, receiver + 1))
        cells.append((square, Tile(text, face, edge={"linewidth": 0}, font=font)))
    side = max(LEAST_IN, min(LARGE_IN, MATRIX_IN / ranks))
    every = ceil(LEAST_HEAD_IN / side)
    heads = [str(name) if rank % every == 0 else "" for rank, name in enumerate(names)]
    ruler = _ruler(range(ranks + 1), [side] * ranks, heads)
    legend = f"darkest: {short(most * itemsize)}B" if most else "no messages"
    return titled(f"{title}; {legend}", flow(_tables(cells, (0, 1), [ruler, ruler])))


def _tables(
    cells: Sequence[tuple[Box, Tile]],
    dims: Sequence[int],
    rulers: Sequence[Ruler],
    height: float = 0.0,
    filled: float = 1.0,
) -> list[list[Tile]]:
    """Place tiles in a table with heads for the last two of ``dims``, one for each step of a third.

    Args:
        cells: boxes and their tiles; boxes that overlap are drawn in this order.
        dims: dims of the boxes that are drawn.
        rulers: steps along each of ``dims``.
        height: height of a table with one dim.
        filled: share of its steps that a tile fills.
    """
    missing = 3 - len(dims)
    (slices, texts), (rows, row_heads), (columns, column_heads) = [
        *[_ruler((0, 1), (height,), ("",))] * missing,
        *rulers,
    ]
    spans = [[(0, 1)] * missing + [(box.start[d], box.stop[d]) for d in dims] for box, _ in cells]
    tables: list[list[Tile]] = []
    for first, text in zip(slices, texts, strict=False):
        table: list[Tile] = []
        for (depth, row, column), (_, tile) in zip(spans, cells, strict=True):
            if depth[0] <= first < depth[1]:
                x, y = columns[column[0]], rows[row[0]]
                size = (columns[column[1]] - x) * filled, (rows[row[1]] - y) * filled
                table.append(replace(tile, x=x, y=y, width=size[0], height=size[1]))
        left, _, right, _ = bounds(table)
        for head, low, length in _heads(columns, column_heads, filled):
            if left <= low + length / 2 < right:
                table.append(Tile(head, None, low, -0.34, length, 0.3))
        for head, low, length in _heads(rows, row_heads, filled):
            table.append(Tile(head, None, -0.7, low, 0.66, length))
        if text:
            words, bold = f"dim {dims[0]}: {text}", {"weight": "bold"}
            table.append(Tile(words, None, -0.7, -0.58, right + 0.7, 0.21, font=bold))
        tables.append(table)
    return tables


def _ruler(edges: Sequence[int], widths: Sequence[float], heads: Sequence[str]) -> Ruler:
    return dict(zip(edges, accumulate(widths, initial=0.0), strict=True)), heads


def _heads(
    places: dict[int, float], heads: Sequence[str], filled: float
) -> Iterator[tuple[str, float, float]]:
    for (low, high), head in zip(pairwise(places.values()), heads, strict=True):
        if head:
            length = max((high - low) * filled, LEAST_HEAD_IN)
            yield head, low + ((high - low) * filled - length) / 2, length


def _range_text(start: int, stop: int) -> str:
    # Long texts are broken into two lines.
    text = f"{start}:{stop}"
    return text if len(text) <= 7 else f"{start}:\n{stop}"
