"""Arrange panels on a page. Panels draw in inches from their upper left corner, y downwards.

The size of a text follows from its available room, so that it always fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from gpudist.errors import NotBuiltError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GAP_IN = 0.35
HEADING_PT, HEADING_LINE_IN = 13.0, 0.26
TITLE_PT, LINE_IN = 10.5, 0.21
# Largest text in panels: 15 px on a page of the largest width that is shown 700 px wide.
TEXT_PT = 12.0
WIDEST_PAGE_IN = 7.5
WIDEST_PANEL_IN = WIDEST_PAGE_IN - 2 * GAP_IN
LEAST_PANEL_IN = 2.9
SMALLEST_PT = 4.5
# For DejaVu Sans, whose digits are 0.636 of the font size wide.
_CHARACTER = 0.66
_LINE = 1.25


@dataclass(frozen=True)
class Panel:
    """Panel on one topic of a picture.

    Attributes:
        title: title above the panel, broken into lines of its width.
        width_in, height_in: room that ``paint`` needs, in inches.
        paint: function that draws into axes whose unit is the inch.
    """

    title: str
    width_in: float
    height_in: float
    paint: Callable[[Axes], None]

    @property
    def outer_width_in(self) -> float:
        return max(self.width_in, LEAST_PANEL_IN)

    @property
    def title_lines(self) -> list[str]:
        return wrap(self.title, int(self.outer_width_in * 72 / (TITLE_PT * 0.62)))

    @property
    def outer_height_in(self) -> float:
        return self.height_in + LINE_IN * (len(self.title_lines) + 0.5)


def figure_of(panels: Sequence[Panel], title: str) -> Figure:
    """Arrange the panels in lines on a page, under a title."""
    require_matplotlib()
    from matplotlib.figure import Figure

    lines = _lines(panels)
    width = max(sum(p.outer_width_in + GAP_IN for p in line) for line in lines) + GAP_IN
    heading = wrap(title, int((width - 2 * GAP_IN) * 72 / (HEADING_PT * 0.62)))
    top = GAP_IN + HEADING_LINE_IN * len(heading)
    height = top + sum(max(p.outer_height_in for p in line) + GAP_IN for line in lines)
    figure = Figure(figsize=(width, height), facecolor="white")
    for number, text in enumerate(heading):
        y = 1 - (0.2 + HEADING_LINE_IN * number) / height
        figure.text(GAP_IN / width, y, text, fontsize=HEADING_PT, va="center", weight="bold")
    for line in lines:
        x = GAP_IN
        for panel in line:
            _place(figure, panel, x, top)
            x += panel.outer_width_in + GAP_IN
        top += max(panel.outer_height_in for panel in line) + GAP_IN
    return figure


def label(
    axes: Axes,
    center: tuple[float, float],
    room: tuple[float, float],
    text: str,
    size_pt: float = TEXT_PT,
    **style: Any,
) -> None:
    """Write ``text`` around ``center``, as large as its ``room`` allows and at most ``size_pt``.

    Text that would be too small to read is omitted.
    """
    lines = text.split("\n")
    longest = max(map(len, lines))
    across = room[0] * 72 / (_CHARACTER * longest)
    down = room[1] * 72 / (_LINE * len(lines))
    size = min(size_pt, across, down)
    if size >= SMALLEST_PT:
        axes.text(*center, text, fontsize=size, ha="center", va="center", linespacing=1.1, **style)


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], **style: Any) -> None:
    """Draw a rectangle from its upper left corner."""
    from matplotlib.patches import Rectangle

    style = {"edgecolor": "0.35", "linewidth": 0.6, **style}
    axes.add_patch(Rectangle(corner, *size, **style))


def short(number: float) -> str:
    """Format a number in at most five characters: 12, 4.1k, 32M."""
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def bytes_text(count: float) -> str:
    """Format a number of bytes: 12 B, 4.1 KiB, 32 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def require_matplotlib() -> None:
    """Check that matplotlib can be imported.

    Raises:
        NotBuiltError: if matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise NotBuiltError(
            "pictures need matplotlib, which is not installed: pip install 'gpudist[draw]', or "
            "pip install matplotlib"
        ) from error


def _lines(panels: Sequence[Panel]) -> list[list[Panel]]:
    lines: list[list[Panel]] = []
    used = 0.0
    for panel in panels:
        width = panel.outer_width_in + GAP_IN
        if not lines or used + width > WIDEST_PAGE_IN:
            lines.append([])
            used = 0.0
        lines[-1].append(panel)
        used += width
    return lines


def _place(figure: Figure, panel: Panel, x: float, y: float) -> None:
    width, height = figure.get_size_inches()
    for number, text in enumerate(panel.title_lines):
        at = 1 - (y + LINE_IN * (number + 0.5)) / height
        figure.text(x / width, at, text, fontsize=TITLE_PT, va="center")
    below = y + LINE_IN * (len(panel.title_lines) + 0.5)
    bottom = 1 - (below + panel.height_in) / height
    axes = figure.add_axes((x / width, bottom, panel.width_in / width, panel.height_in / height))
    axes.set_xlim(0, panel.width_in)
    axes.set_ylim(panel.height_in, 0)
    axes.axis("off")
    panel.paint(axes)
