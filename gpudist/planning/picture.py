"""Draw the planned partitions: the parts of a step's time, and the memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from gpudist.checks.arguments import checked
from gpudist.pictures.page import Tile, figure_of, titled
from gpudist.planning.advice import Advice
from gpudist.planning.table import bytes_of, seconds_of, title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DRAWN = 12
NAME_IN, LENGTH_IN, VALUE_IN = 1.75, 3.6, 1.0
LINE_IN, BAR_IN = 0.32, 0.22
# Side of a square in the legend.
SQUARE_IN = 0.14
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
    title: str, bars: Bars, colors: dict[str, str], marked: Sequence[bool] = ()
) -> list[Tile]:
    """Return one bar per partition, divided into parts, above a legend; marked values are red."""
    longest = max((sum(parts) for _, parts, _ in bars), default=0.0) or 1.0
    flat = {"linewidth": 0}
    tiles: list[Tile] = []
    for number, (name, parts, value) in enumerate(bars):
        top = number * LINE_IN
        tiles.append(Tile(name, None, 0, top, NAME_IN, BAR_IN, 9))
        starts = accumulate(parts, initial=0.0)
        for start, part, color in zip(starts, parts, colors.values(), strict=False):
            x, width = NAME_IN + LENGTH_IN * start / longest, LENGTH_IN * part / longest
            tiles.append(Tile("", color, x, top, width, BAR_IN, edge=flat))
        font = {"color": "#d62728"} if any(marked[number : number + 1]) else {}
        tiles.append(Tile(value, None, NAME_IN + LENGTH_IN, top, VALUE_IN, BAR_IN, 9, font=font))
    pitch = (NAME_IN + LENGTH_IN + VALUE_IN) / len(colors)
    top = len(bars) * LINE_IN + 0.1
    for number, (name, color) in enumerate(colors.items()):
        x = number * pitch
        tiles.append(Tile("", color, x, top, SQUARE_IN, SQUARE_IN, edge=flat))
        x += SQUARE_IN + 0.06
        tiles.append(Tile(name, None, x, top, pitch - SQUARE_IN - 0.06, SQUARE_IN, 8, "left"))
    return titled(title, tiles)
