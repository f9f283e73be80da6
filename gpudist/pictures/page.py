"""Draw a page of tiles: rectangles and texts, in inches, x to the right and y downwards.

The size of a text follows from its tile, so that it always fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from gpudist.errors import NotBuiltError, ShapeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP_IN = 0.35
# Largest text in panels: 15 px on a page of the largest width that is shown 700 px wide.
TEXT_PT, TITLE_PT, HEADING_PT = 12.0, 10.5, 13.0
SMALLEST_PT = 4.5
WIDEST_IN = 7.1
LEAST_PANEL_IN = 2.9
# For DejaVu Sans, whose digits are 0.636 of the font size wide.
_CHARACTER, _LINE = 0.64, 1.25
_EDGE = {"edgecolor": "0.35", "linewidth": 0.6}


@dataclass(frozen=True)
class Tile:
    """Rectangle with a text in it.

    Attributes:
        text: lines of text; omitted where it would be too small to read.
        face: colour of the rectangle; without one only the text is drawn.
        x, y: upper left corner.
        width, height: size, which the text does not exceed.
        size_pt: largest size of the text.
        align: place of the text between left and right.
        edge: other options of the rectangle.
        font: other options of the text.
    """

    text: str = ""
    face: str | tuple[float, ...] | None = None
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    size_pt: float = TEXT_PT
    align: Literal["left", "center"] = "center"
    edge: dict[str, Any] = field(default_factory=dict[str, Any])
    font: dict[str, Any] = field(default_factory=dict[str, Any])


def flow(groups: Iterable[Sequence[Tile]], gap_in: float = GAP_IN) -> list[Tile]:
    """Move groups of tiles next to each other, in lines as wide as the page."""
    tiles: list[Tile] = []
    x = y = below = 0.0
    for group in groups:
        left, top, right, bottom = bounds(group)
        if x and x + right - left > WIDEST_IN:
            x, y = 0.0, below + gap_in
        tiles += [replace(tile, x=tile.x - left + x, y=tile.y - top + y) for tile in group]
        x += right - left + gap_in
        below = max(below, y + bottom - top)
    return tiles


def titled(title: str, tiles: Sequence[Tile], size_pt: float = TITLE_PT, **font: Any) -> list[Tile]:
    """Write a title above ``tiles``, in lines of their width."""
    left, top, right, _ = bounds(tiles)
    width, height = max(right - left, LEAST_PANEL_IN), size_pt / 50
    lines = wrap(title, int(width * 72 / (size_pt * _CHARACTER)))
    top -= height * (len(lines) + 0.5)
    return [
        Tile(line, None, left, top + number * height, width, height, size_pt, "left", font=font)
        for number, line in enumerate(lines)
    ] + list(tiles)


def bounds(tiles: Sequence[Tile]) -> tuple[float, float, float, float]:
    """Return the left, upper, right and lower ends of ``tiles``."""
    corners = [(t.x, t.y, t.x + t.width, t.y + t.height) for t in tiles] or [(0.0,) * 4]
    lefts, tops, rights, bottoms = zip(*corners, strict=True)
    return min(lefts), min(tops), max(rights), max(bottoms)


def figure_of(panels: Iterable[Sequence[Tile]], title: str) -> Figure:
    """Draw panels on a page, under a title."""
    require_picture()
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    page = titled(title, flow(panels), HEADING_PT, weight="bold")
    left, top, right, bottom = bounds(page)
    width, height = right - left + 2 * GAP_IN, bottom - top + 2 * GAP_IN
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(left - GAP_IN, right + GAP_IN), ylim=(bottom + GAP_IN, top - GAP_IN))
    axes.axis("off")
    for tile in page:
        if tile.face is not None:
            style = {**_EDGE, **tile.edge, "facecolor": tile.face}
            axes.add_patch(Rectangle((tile.x, tile.y), tile.width, tile.height, **style))
        size_pt = _text_pt(tile)
        if tile.text and size_pt >= SMALLEST_PT:
            x = tile.x + (tile.width / 2 if tile.align == "center" else 0)
            axes.text(
                x, tile.y + tile.height / 2, tile.text, fontsize=size_pt, ha=tile.align,
                va="center", linespacing=1.1, **tile.font,
            )  # fmt: skip
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure to a file; equal figures give equal bytes.

    Raises:
        ShapeError: if the suffix does not name a format that can be written.
        OSError: if the file cannot be written.
    """
    import matplotlib

    require_picture(path)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "gpudist"}):
        figure.savefig(path, dpi=120, metadata=undated.get(Path(path).suffix.lower()))


def require_picture(path: str | Path | None = None) -> None:
    """Check that a picture can be drawn, and written to ``path`` if it is given.

    Raises:
        ShapeError: if the suffix does not name a format that can be written.
        NotBuiltError: if matplotlib is not installed.
    """
    if path is not None and Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ShapeError(f"{path}: the suffix of a picture must be .png, .svg or .pdf")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise NotBuiltError(
            "pictures need matplotlib, which is not installed: pip install 'gpudist[draw]', or "
            "pip install matplotlib"
        ) from error


def short(number: float) -> str:
    """Format a number in at most five characters: 12, 4.1k, 32M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")(float(f"{number:.3g}"))


def _text_pt(tile: Tile) -> float:
    lines = tile.text.split("\n")
    across = tile.width * 72 / (_CHARACTER * max(1, *map(len, lines)))
    return min(tile.size_pt, across, tile.height * 72 / (_LINE * len(lines)))
