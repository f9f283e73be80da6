"""Draw a plan: the layouts of all functions, and those that it prescribes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudist.convert.network_plan import NetworkPlan, Stretch
from gpudist.geometry.layout import Sbp
from gpudist.pictures.page import TEXT_PT, Panel, box, bytes_text, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME_IN, CELL_IN, LINE_IN = 3.4, 0.8, 0.3
STRETCH_IN, MOVED_IN = 0.55, 1.0
COLORS = {"split": "#a6cee3", "broadcast": "#fdbf6f", "partial_sum": "#cab2d6"}


def stretches_panel(plan: NetworkPlan) -> Panel:
    """Return a panel with a line for each stretch of functions in one layout.

    A line has the functions, a cell for each axis of the grid, and what entering the stretch moves.
    """
    grid = plan.grid or ()
    cut = [axis for axis, parts in enumerate(grid) if parts > 1]
    width = NAME_IN + CELL_IN * len(cut)

    def paint(axes: Axes) -> None:
        for number, stretch in enumerate(plan.stretches):
            top = number * STRETCH_IN
            middle = top + STRETCH_IN / 2
            label(axes, (NAME_IN / 2, middle), (NAME_IN * 0.95, STRETCH_IN), _ends(stretch), 10)
            for column, axis in enumerate(cut):
                kind = "broadcast" if stretch.whole.get(axis) else "split"
                left = NAME_IN + column * CELL_IN
                box(axes, (left, top), (CELL_IN, STRETCH_IN), facecolor=COLORS[kind])
                text = f"{'whole' if kind == 'broadcast' else 'split'}\naxis {axis}"
                label(axes, (left + CELL_IN / 2, middle), (CELL_IN, STRETCH_IN), text, 10)
            moved = bytes_text(stretch.entering_bytes) if stretch.entering_bytes else "nothing"
            at = (width + MOVED_IN / 2, middle)
            label(axes, at, (MOVED_IN * 0.95, STRETCH_IN), f"moves\n{moved}", 10)

    title = (
        f"Functions in the order of the forward on {list(grid)}; moves: what a rank sends in a "
        "step to enter the layout"
    )
    return Panel(title, width + MOVED_IN, STRETCH_IN * len(plan.stretches) + 0.02, paint)


def _ends(stretch: Stretch) -> str:
    if stretch.functions == 1:
        return stretch.first
    return f"{stretch.first}\nto {stretch.last}\n{stretch.functions} functions"


def layouts_panel(plan: NetworkPlan) -> Panel:
    """Return a panel with a line for each layout, and a cell for each axis of its grid."""
    axes_of_all = max((len(pin.sbp) for pin in plan.layouts), default=1)

    def paint(axes: Axes) -> None:
        for number, pin in enumerate(plan.layouts):
            top = number * LINE_IN
            name, _, _ = str(pin).partition(": (")
            middle = top + LINE_IN / 2
            label(axes, (NAME_IN / 2, middle), (NAME_IN * 0.95, LINE_IN), name, TEXT_PT)
            for axis, sbp in enumerate(pin.sbp):
                left = NAME_IN + axis * CELL_IN
                box(axes, (left, top), (CELL_IN, LINE_IN), facecolor=COLORS[sbp.kind])
                label(axes, (left + CELL_IN / 2, middle), (CELL_IN, LINE_IN), _word(sbp), TEXT_PT)

    title = "Layouts in the order of the forward: a cell for each axis of the grid"
    height = LINE_IN * max(1, len(plan.layouts))
    return Panel(title, NAME_IN + CELL_IN * axes_of_all + 0.02, height + 0.02, paint)


def _word(sbp: Sbp) -> str:
    return f"dim {sbp.dim}" if sbp.is_split else {"broadcast": "whole"}.get(sbp.kind, "sum")
