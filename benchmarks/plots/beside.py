"""Plot gpudist and its peers: the ratio of times in each case of a subject, below 1 if faster."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.intervals import ratio_interval
from benchmarks.plots.style import hidden, legend, looks, panels
from benchmarks.rows import CEILINGS, NO_PEER, Row

_INCHES_A_CASE = 0.3
_COARSE = tuple(digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5))
_FINE = (
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    *(1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0),
)


def beside(rows: Sequence[Row], subject: str, ranks: int) -> Figure | None:
    """Plot one subject; bars are 95 % intervals of rows that have samples."""
    of = [r for r in rows if (r.subject, r.ranks) == (subject, ranks) and r.peer != NO_PEER]
    if not of:
        return None
    cases = list(dict.fromkeys(r.case for r in of))
    names = list(dict.fromkeys(r.peer for r in of))
    peers = [name for name in names if name not in hidden(names)]
    style = looks(peers)
    figure, (axis,) = panels(1, 1, 9.0, 1.2 + _INCHES_A_CASE * len(cases))
    for peer in peers:
        shown = [r for r in of if r.peer == peer]
        heights = [cases.index(r.case) for r in shown]
        look = style[peer]
        is_bound = peer in CEILINGS
        axis.scatter(
            [r.ratio for r in shown], heights, label=f"bound: {peer}" if is_bound else peer,
            color="none" if is_bound else look.colour, edgecolors=look.colour, marker=look.marker,
            s=30, zorder=3,
        )  # fmt: skip
        for row, height in zip(shown, heights, strict=True):
            if row.us and row.peer_us:
                low, high = ratio_interval(row.peer_us, row.us)
                axis.plot([low, high], [height, height], color=look.colour, linewidth=1.2)
    axis.axvline(1.0, color="black", linestyle="--", linewidth=1, label="same time")
    axis.set_xscale("log")
    ratios = [r.ratio for r in of if r.ratio is not None] + [1.0]
    low, high = min(ratios) / 1.25, max(ratios) * 1.25
    axis.set_xlim(low, high)
    ticks = [tick for tick in (_COARSE if high / low > 12 else _FINE) if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=9)
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    axis.set_ylim(len(cases) - 0.4, -0.6)
    axis.set_xlabel("time of gpudist over time of the peer (left: gpudist is faster)", fontsize=9)
    axis.set_title(f"{subject}, {ranks} ranks", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    legend(figure, [axis])
    return figure
