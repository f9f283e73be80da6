"""Draw the communication matrix of a stage: bytes by sender and receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudist.pictures.page import Panel, box, bytes_text, label, short
from gpudist.pictures.scene import StageTraffic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARGIN_IN = 0.6
LARGE_IN, LEAST_IN, WIDEST_IN = 0.62, 0.012, 3.6
WRITTEN_RANKS = 8
NAME_EVERY_IN = 0.3
COLOR = (0.12, 0.35, 0.65)


def matrix_panel(moved: StageTraffic, names: Sequence[int], itemsize: int, title: str) -> Panel:
    """Return a panel with a square per sender (down) and receiver (across), darker for more bytes.

    Args:
        moved: cells by sender and receiver.
        names: world ranks.
        itemsize: bytes of a cell.
        title: title of the panel.
    """
    side = max(LEAST_IN, min(LARGE_IN, WIDEST_IN / len(names)))
    most = max(moved.cells.values(), default=0)
    legend = f"darkest: {bytes_text(most * itemsize)}" if most else "no messages"

    def paint(axes: Axes) -> None:
        whole = side * len(names)
        box(axes, (MARGIN_IN, MARGIN_IN), (whole, whole), facecolor="white")
        for (sender, receiver), cells in moved.cells.items():
            corner = (MARGIN_IN + receiver * side, MARGIN_IN + sender * side)
            share = cells / most
            box(axes, corner, (side, side), facecolor=_shade(share), linewidth=0)
            if len(names) <= WRITTEN_RANKS:
                center = (corner[0] + side / 2, corner[1] + side / 2)
                color = "white" if share > 0.55 else "black"
                text = short(cells * itemsize)
                label(axes, center, (side * 0.9, side), text, color=color)
        _paint_names(axes, names, side)

    extent = MARGIN_IN + side * len(names) + 0.1
    return Panel(f"{title}; {legend}", extent, extent, paint)


def _paint_names(axes: Axes, names: Sequence[int], side: float) -> None:
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64) if n * side >= NAME_EVERY_IN or n == 64)
    for rank in range(0, len(names), step):
        at = MARGIN_IN + (rank + 0.5) * side
        room = (step * side * 0.85, 0.2)
        label(axes, (at, MARGIN_IN - 0.12), room, str(names[rank]))
        label(axes, (MARGIN_IN - 0.17, at), (0.24, 0.2), str(names[rank]))
    middle = MARGIN_IN + side * len(names) / 2
    length = max(1.1, side * len(names))
    label(axes, (max(middle, 0.6), 0.17), (length, 0.2), "receives")
    label(axes, (0.14, max(middle, 0.6)), (length, 0.2), "sends", rotation=90)


def _shade(share: float) -> tuple[float, ...]:
    # Even small messages remain visible.
    strength = 0.15 + 0.85 * share
    return tuple(1 - strength * (1 - channel) for channel in COLOR)
