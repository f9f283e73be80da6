"""Draw the layouts of a plan, in the order in which they are prescribed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudist.convert.network_plan import NetworkPlan
from gpudist.geometry.layout import Sbp
from gpudist.pictures.page import TEXT_PT, Panel, box, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME_IN, CELL_IN, LINE_IN = 3.4, 0.8, 0.3
COLORS = {"split": "#a6cee3", "broadcast": "#fdbf6f", "partial_sum": "#cab2d6"}


def layouts_panel(plan: NetworkPlan) -> Panel:
    """Return a panel with a line for each layout, and a cell for each axis of its grid."""
    axes_of_all = max((len(pin.sbp) for pin in plan.layouts), default=1)

    def paint(axes: Axes) -> None:
        for number, pin in enumerate(plan.layouts):
            top = number * LINE_IN
            name, _, _ = str(pin).partition(": (")
            middle = top + LINE_IN / 2
            label(axes, (NAME_IN / 2, middle), (NAME_IN * 0.95, LINE_IN), name, TEXT_PT)
            for axis, one in enumerate(pin.sbp):
                left = NAME_IN + axis * CELL_IN
                box(axes, (left, top), (CELL_IN, LINE_IN), facecolor=COLORS[one.kind])
                label(axes, (left + CELL_IN / 2, middle), (CELL_IN, LINE_IN), _word(one), TEXT_PT)

    title = "Layouts in the order of the forward: a cell for each axis of the grid"
    height = LINE_IN * max(1, len(plan.layouts))
    return Panel(title, NAME_IN + CELL_IN * axes_of_all + 0.02, height + 0.02, paint)


def _word(one: Sbp) -> str:
    return f"dim {one.dim}" if one.is_split else {"broadcast": "whole"}.get(one.kind, "sum")
