"""Draw the planned partitions: the parts of a step's time, and the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudist.checks.arguments import checked
from gpudist.pictures.page import Panel, box, figure_of, label
from gpudist.planning.advice import Advice
from gpudist.planning.table import bytes_of, seconds_of, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DRAWN = 12
NAME_IN, LENGTH_IN, VALUE_IN = 1.75, 3.6, 1.0
LINE_IN, BAR_IN = 0.32, 0.22
# Legend: side of a square, its distance from the text, and a character's average width.
SQUARE_IN, CHARACTER_IN, NARROW_IN = 0.14, 0.075, 0.061
# Computing is dark, moving is light; forward is blue, backward green.
TIMES = {
    "forward, computing": "#1f78b4",
    "forward, moving": "#a6cee3",
    "backward, computing": "#33a02c",
    "backward, moving": "#b2df8a",
}
MEMORY = {
    "parameters": "#6a3d9a",
    "gradients": "#cab2d6",
    "optimizer": "#ff7f00",
    "activations": "#fdbf6f",
    "temporary": "#b15928",
    "staging": "#999999",
}

Bars = Sequence[tuple[str, Sequence[float], str]]


@checked()
def picture_of(advice: Sequence[Advice], title: str) -> Figure:
    """Draw bars for at most 12 partitions, in the order of ``advice``: time of a step, and memory.

    Args:
        advice: result of :func:`gpudist.planning.plan`.
        title: title of the picture.

    Returns:
        A matplotlib figure.

    Raises:
        NotBuiltError: if matplotlib is not installed.
    """
    shown = advice[:MOST_DRAWN]
    overlaps = any(one.overlaps for one in shown)
    words = "what kernels do not hide" if overlaps else "nothing beside anything else"
    panels = (
        _panel(f"Predicted time of a step on the slowest rank; moving is {words}",
               [_times(one) for one in shown], TIMES),
        _panel("Memory of the rank that holds most; red does not fit",
               [_memory(one) for one in shown], MEMORY,
               [one.fits is False for one in shown]),
    )  # fmt: skip
    return figure_of(panels, title)


def _times(advice: Advice) -> tuple[str, Sequence[float], str]:
    parts: list[float] = []
    for phase in (advice.slowest.forward, advice.slowest.backward):
        whole = phase.overlapped_s if advice.overlaps else phase.serial_s
        parts += [phase.compute_s, max(0.0, whole - phase.compute_s)]
    return title_of(advice), parts, seconds_of(advice.seconds)


def _memory(advice: Advice) -> tuple[str, Sequence[float], str]:
    memory = advice.memory
    return title_of(advice), [getattr(memory, n) for n in MEMORY], bytes_of(memory.total)


def _panel(
    title: str, bars: Bars, colors: dict[str, str], marked: Sequence[bool] | None = None
) -> Panel:
    """Return a panel with one bar per partition, divided into parts, above a legend."""
    longest = max((sum(parts) for _, parts, _ in bars), default=0.0) or 1.0

    def paint(axes: Axes) -> None:
        for number, (name, parts, value) in enumerate(bars):
            top = number * LINE_IN
            middle = top + BAR_IN / 2
            label(axes, (NAME_IN / 2, middle), (NAME_IN * 0.95, BAR_IN), name, 9)
            x = NAME_IN
            for part, color in zip(parts, colors.values(), strict=True):
                width = LENGTH_IN * part / longest
                box(axes, (x, top), (width, BAR_IN), facecolor=color, linewidth=0)
                x += width
            style = {"color": "#d62728"} if marked is not None and marked[number] else {}
            at = (NAME_IN + LENGTH_IN + VALUE_IN / 2, middle)
            label(axes, at, (VALUE_IN * 0.9, BAR_IN), value, 9, **style)
        _paint_legend(axes, len(bars) * LINE_IN + 0.1, colors)

    width = NAME_IN + LENGTH_IN + VALUE_IN
    return Panel(title, width, len(bars) * LINE_IN + 0.4, paint)


def _paint_legend(axes: Axes, top: float, colors: dict[str, str]) -> None:
    pitch = (NAME_IN + LENGTH_IN + VALUE_IN) / len(colors)
    for number, (name, color) in enumerate(colors.items()):
        x = number * pitch
        box(axes, (x, top), (SQUARE_IN, SQUARE_IN), facecolor=color, linewidth=0)
        at = (x + SQUARE_IN + 0.06 + len(name) * NARROW_IN / 2, top + SQUARE_IN / 2)
        label(axes, at, (len(name) * CHARACTER_IN, 0.2), name, 8)
