"""The picture of advice shows every partition, and all its text is readable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

pytest.importorskip("matplotlib")

from matplotlib.patches import Rectangle

from gpudist.planning import Advice, plan, profile_of
from gpudist.planning.picture import LENGTH_IN, MEMORY, MOST_DRAWN, TIMES, picture_of
from tests.pictures.test_draw import SMALLEST_PT, labels, overlapping


def advice(profile: str = "a100", **changed: float) -> list[Advice]:
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
    machine = replace(profile_of(profile), **changed)
    return plan(network, (2, 1, 1024, 1 << 16), 4, machine)


@pytest.mark.parametrize("count", [1, 5, MOST_DRAWN + 1])
def test_labels_can_be_read(count: int) -> None:
    shown = (advice() * 3)[:count]
    figure = picture_of(shown, "a network on 4 ranks")
    found = labels(figure)
    assert overlapping(found) == []
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 for _, box in found)
    assert all(page.y0 <= box.y0 and box.y1 <= page.y1 for _, box in found)
    assert min(float(text.get_fontsize()) for text, _ in found) >= SMALLEST_PT
    written = [text.get_text() for text, _ in found]
    assert {*TIMES, *MEMORY} <= set(written)
    names = [str(list(one.grid)) for one in shown[:MOST_DRAWN]]
    assert sorted(text for text in written if text in names) == sorted(2 * names)


def test_bars_are_as_long_as_times_and_memory() -> None:
    shown = advice(memory_gib=1e-3)
    figure = picture_of(shown, "a network")
    widths = [p.get_width() for p in figure.axes[0].patches if isinstance(p, Rectangle)]
    for wholes, parts in (
        ([a.seconds for a in shown], len(TIMES)),
        ([a.memory.total for a in shown], len(MEMORY)),
    ):
        # The legend follows the bars.
        bars, widths = widths[: parts * len(shown)], widths[parts * (len(shown) + 1) :]
        found = [sum(bars[i : i + parts]) for i in range(0, len(bars), parts)]
        assert found == pytest.approx([LENGTH_IN * w / max(wholes) for w in wholes])
    assert widths == []
    red = [text for text, _ in labels(figure) if text.get_color() == "#d62728"]
    assert len(red) == len(shown)
