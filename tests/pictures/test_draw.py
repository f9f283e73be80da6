"""Every label can be read: labels do not overlap, leave the page, or get tiny."""

from __future__ import annotations

import sys
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import gpudist
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry import SlidingWindow
from gpudist.pictures.panels import color_at

SMALLEST_PT = 4.5
THREE = SlidingWindow(3, padding=(1, 1))
FIVE = SlidingWindow(5, padding=(2, 2))
PICTURES: dict[str, dict[str, Any]] = {
    "1-d, 2": dict(shape=[20], P_x=[2], window=[FIVE]),
    "1-d, 4": dict(shape=[1 << 20], P_x=[4], halo=[(3, 1)]),
    "1-d, 64": dict(shape=[1 << 20], P_x=[64], halo=[(1, 1)], periodic=True),
    "2-d, 2": dict(shape=[8, 3, 64, 48], P_x=[1, 1, 2, 1], window=[THREE] * 2),
    "2-d, 4": dict(shape=[64, 48], P_x=[2, 2], window=[THREE] * 2),
    "2-d, 64": dict(shape=[20000, 30000], P_x=[8, 8], window=[FIVE] * 2, nested=True),
    "3-d, 2": dict(shape=[16, 16, 16], P_x=[2, 1, 1], window=[THREE] * 3, dims=[0, 1, 2]),
    "3-d, 4": dict(shape=[33, 33, 33], P_x=[2, 2, 1], window=[THREE] * 3, dims=[0, 1, 2]),
    "3-d, 64": dict(shape=[1, 8, 512, 512, 512], P_x=[1, 1, 4, 4, 4], window=[THREE] * 3),
    "uneven": dict(shape=[5, 9], P_x=[2, 8], window=[FIVE] * 2),
    "empty blocks": dict(shape=[3], P_x=[4], window=[THREE]),
    "unused input": dict(shape=[20], P_x=[6], window=[SlidingWindow(2, stride=2)]),
    "repartition, 4": dict(shape=[64, 48], P_x=[4, 1], P_y=[1, 4]),
    "repartition, 64": dict(shape=[64, 64, 10], P_x=[8, 8, 1], P_y=[4, 4, 4]),
    "scatter": dict(shape=[64, 48], P_x=[1, 1], P_y=[2, 3]),
}


def labels(figure: Figure) -> list[tuple[Text, Bbox]]:
    """Every text that shows, and where, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts: list[Any] = [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_text() and text.get_visible()
    ]
    shown = [text for text in texts if text in figure.axes[0].texts]
    return [(text, text.get_window_extent(renderer)) for text in shown]


def overlapping(found: list[tuple[Text, Bbox]]) -> list[tuple[str, str]]:
    return [
        (a.get_text(), b.get_text())
        for (a, where), (b, there) in combinations(found, 2)
        if where.overlaps(there)
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PICTURES)
def test_labels_can_be_read(name: str) -> None:
    figure = gpudist.draw(**PICTURES[name])
    found = labels(figure)
    assert overlapping(found) == []
    page = figure.bbox
    outside = [
        text.get_text() for text, where in found
        if where.x0 < page.x0 or where.x1 > page.x1 or where.y0 < page.y0 or where.y1 > page.y1
    ]  # fmt: skip
    assert outside == []
    assert min(float(text.get_fontsize()) for text, _ in found) >= SMALLEST_PT
    written = {text.get_text().split("\n")[0] for text, _ in found}
    picture = PICTURES[name]
    assert {str(rank) for rank in range(prod(picture.get("P_y", picture["P_x"])))} <= written


def test_neighbours_differ_in_colour() -> None:
    steps = [step for step in product((-1, 0, 1), repeat=3) if any(step)]
    assert all(color_at(step) != color_at((0, 0, 0)) for step in steps)


def test_what_is_written() -> None:
    written = [text.get_text() for text, _ in labels(gpudist.draw(**PICTURES["2-d, 4"], rank=0))]
    assert "0\nkeeps\n768" in written
    assert "1\nin 32\nout 32" in written
    assert "3\nin 1\nout 1" in written
    assert "24:48" in written and "-1:0" in written
    assert written.count("128") == 4 and written.count("96") == 4


def test_itemsize_counts() -> None:
    written = [
        text.get_text() for text, _ in labels(gpudist.draw(**PICTURES["2-d, 4"], itemsize=8))
    ]
    assert written.count("256") == 4


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_file_is_the_same_again(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        gpudist.draw([20], [2], window=[FIVE], path=tmp_path / f"{name}.{suffix}")
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert first == (tmp_path / f"b.{suffix}").read_bytes()
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_suffix(tmp_path: Path) -> None:
    with pytest.raises(
        ShapeError, match=r"a.jpg: the suffix of a picture must be \.png, \.svg or \.pdf"
    ):
        gpudist.draw([20], [2], path=tmp_path / "a.jpg")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(shape=[8, 8], P_x=[2]), ShapeError, "one axis per dim"),
        (dict(shape=[8], P_x=[0]), PartitionError, "has no workers"),
        (dict(shape=[8], P_x=[2], P_y=[1], halo=[(1, 1)]), ShapeError, "one movement"),
        (dict(shape=[8], P_x=[2], halo=[(1, 1)], rank=2), PartitionError, "rank 2 is not in"),
        (dict(shape=[8], P_x=[2], halo=[(1, 1)] * 2), PartitionError, "2 windows for"),
        (
            dict(shape=[8], P_x=[2], halo=[(1, 1)], periodic=[]),
            ShapeError,
            "periodic has 0",
        ),
        (dict(shape=[2000], P_x=[513]), PartitionError, "513 ranks"),
        (dict(shape=[8] * 4, P_x=[2] * 4), PartitionError, "at most three"),
        (dict(shape=[8] * 2, P_x=[2] * 2, dims=[0]), PartitionError, "asked for"),
        (dict(shape=[8] * 2, P_x=[2] * 2, dims=[0, 5]), PartitionError, "not among the 2 dims"),
    ],
)
def test_mistakes(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gpudist.draw(**arguments)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(gpudist.NotBuiltError, match=r"pip install 'gpudist\[draw\]'"):
        gpudist.draw([8], [2])
