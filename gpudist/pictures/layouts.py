"""Draw a plan: the layouts of all functions, and those that it prescribes."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.convert.network_plan import NetworkPlan
from gpudist.pictures.page import TEXT_PT, Tile, short, titled

NAME_IN, CELL_IN, LINE_IN, STRETCH_IN = 3.4, 0.8, 0.3, 0.55
COLORS = {"split": "#a6cee3", "broadcast": "#fdbf6f", "partial_sum": "#cab2d6"}
WORDS = {"broadcast": "whole", "partial_sum": "sum"}

# Text and colour of a cell; name and cells of a line.
Cell = tuple[str, str | None]
Line = tuple[str, list[Cell]]


def stretches_panel(plan: NetworkPlan) -> list[Tile]:
    """Return a line for each stretch of functions in one layout.

    A line has the functions, a cell for each axis of the grid, and what entering the stretch moves.
    """
    grid = plan.grid or ()
    axes = [axis for axis, parts in enumerate(grid) if parts > 1]
    lines: list[Line] = []
    for stretch in plan.stretches:
        name = stretch.first
        if stretch.functions > 1:
            name += f"\nto {stretch.last}\n{stretch.functions} functions"
        kinds = ["broadcast" if stretch.whole.get(axis) else "split" for axis in axes]
        cells: list[Cell] = [
            (f"{WORDS.get(kind, kind)}\naxis {axis}", COLORS[kind])
            for axis, kind in zip(axes, kinds, strict=True)
        ]
        moved = f"{short(stretch.entering_bytes)}B" if stretch.entering_bytes else "nothing"
        lines.append((name, [*cells, (f"moves\n{moved}", None)]))
    title = (
        f"Functions in the order of the forward on {list(grid)}; moves: what a rank sends in a "
        "step to enter the layout"
    )
    return _panel(title, lines, STRETCH_IN, 10)


def layouts_panel(plan: NetworkPlan) -> list[Tile]:
    """Return a line for each layout, with a cell for each axis of its grid."""
    lines: list[Line] = [
        (
            str(pin).partition(": (")[0],
            [(f"dim {s.dim}" if s.is_split else WORDS[s.kind], COLORS[s.kind]) for s in pin.sbp],
        )
        for pin in plan.layouts
    ]
    title = "Layouts in the order of the forward: a cell for each axis of the grid"
    return _panel(title, lines, LINE_IN, TEXT_PT)


def _panel(title: str, lines: Sequence[Line], height: float, size_pt: float) -> list[Tile]:
    tiles: list[Tile] = []
    for number, (name, cells) in enumerate(lines):
        top = number * height
        tiles.append(Tile(name, None, 0, top, NAME_IN, height, size_pt))
        for column, (text, face) in enumerate(cells):
            x = NAME_IN + column * CELL_IN
            tiles.append(Tile(text, face, x, top, CELL_IN, height, size_pt))
    return titled(title, tiles)
