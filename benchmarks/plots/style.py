"""Shared style of all pictures: colours by peer, one legend, files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

OURS = "gpudist"
FORMATS = ("png", "svg")
# Colours that the colour-blind can tell apart (Okabe and Ito).
_COLOURS = {
    OURS: "#0072B2",
    "mpi (best)": "#D55E00",
    "mpi bare (best)": "#E69F00",
    "gloo": "#009E73",
    "dtensor": "#CC79A7",
    "mpi4torch": "#7F3FBF",
    "local torch": "#444444",
    "sequential": "#E69F00",
}
_OTHERS = ("#56B4E9", "#8C564B", "#7F7F7F", "#BCBD22", "#17BECF", "#F0A3FF")
_MARKERS = {OURS: "o", "mpi (best)": "s", "mpi bare (best)": "D", "gloo": "^", "dtensor": "v"}


def hidden(names: Collection[str]) -> set[str]:
    """Return both MPIs if the better one of each case is shown."""
    return {
        f"{mpi}{kind}"
        for kind in (" bare", "")
        if f"mpi{kind} (best)" in names
        for mpi in ("openmpi", "mpich")
    }


class Look(NamedTuple):
    colour: str
    marker: str


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Return a colour and a marker for each side; well-known sides always have their own."""
    free = [name for name in dict.fromkeys(names) if name not in _COLOURS]
    found = {name: _OTHERS[number % len(_OTHERS)] for number, name in enumerate(free)}
    return {
        name: Look(_COLOURS.get(name, found.get(name, "")), _MARKERS.get(name, "o"))
        for name in dict.fromkeys(names)
    }


def panels(count: int, most_columns: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure with ``count`` axes, each ``width`` by ``height`` inches, row by row."""
    columns = min(count, most_columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [each for row in grid for each in row]
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def legend(figure: Figure, axes: Sequence[Any], columns: int = 4) -> None:
    """Draw one legend for all axes, above them."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, name in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center",
        ncols=min(columns, len(handles)), frameon=False, fontsize=9,
    )  # fmt: skip


def save(figure: Figure, name: str, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write the picture in each format; equal rows give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{ending}" for ending in formats]
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata=metadata)
    return paths
