"""Bus bandwidth against size, one panel per operator, below the ceilings of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.bandwidth import BUS_FACTORS, operator_of
from benchmarks.plots.style import OURS, hidden, legend, looks, panels
from benchmarks.rows import CEILINGS, MEMORY_COPY, NO_PEER, Row

LINK = "link (one bare message)"
_LEAST_SIZES = 3
Points = list[tuple[int, float]]


def bandwidth(rows: Sequence[Row], ranks: int) -> Figure | None:
    """Plot operators measured at three sizes or more; return ``None`` if there are none."""
    recycled = [r for r in rows if r.ranks == ranks and not r.case.endswith(", new pages")]
    operators: dict[str, list[Row]] = {}
    for row in recycled:
        operator = operator_of(row.subject, row.case)
        if operator in BUS_FACTORS and row.subject not in ("halo", "dynamic"):
            operators.setdefault(operator, []).append(row)
    link = _ours([row for row in operators.get("messages", ()) if row.case.endswith(", bare")])
    operators["messages"] = [
        row for row in operators.get("messages", ()) if not row.case.endswith(", bare")
    ]
    shown = {
        name: of for name, of in operators.items() if len({r.bytes for r in of}) >= _LEAST_SIZES
    }
    if not shown:
        return None
    figure, axes = panels(len(shown), 3, 3.6, 2.7)
    for axis, (operator, of) in zip(axes, shown.items(), strict=True):
        _panel(axis, operator, of, link, ranks)
    legend(figure, axes)
    return figure


def _panel(axis: Any, operator: str, rows: Sequence[Row], link: Points, ranks: int) -> None:
    factor = BUS_FACTORS[operator](ranks)
    names = list(dict.fromkeys(r.peer for r in rows))
    peers = [name for name in names if name not in {*CEILINGS, NO_PEER, *hidden(names)}]
    style = looks([OURS, *peers])
    sizes = [r.bytes for r in rows]
    for peer in peers:
        points = _points({r.bytes: r.peer_us_median for r in rows if r.peer == peer}, factor)
        look = style[peer]
        axis.plot(
            *zip(*points, strict=True), label=peer, color=look.colour, marker=look.marker,
            markersize=4, linewidth=1.2,
        )  # fmt: skip
    ours = _ours(rows, factor)
    axis.plot(
        *zip(*ours, strict=True), label=OURS, color=style[OURS].colour, marker="o", linewidth=2.2,
    )  # fmt: skip
    low = [y for _, y in _points({r.bytes: r.us_p90 for r in rows}, factor)]
    high = [y for _, y in _points({r.bytes: r.us_p10 for r in rows}, factor)]
    axis.fill_between([x for x, _ in ours], low, high, color=style[OURS].colour, alpha=0.2)
    copies = _points({r.bytes: r.peer_us_median for r in rows if r.peer == MEMORY_COPY}, 1.0)
    if copies:
        axis.plot(
            *zip(*copies, strict=True), label=f"ceiling: {MEMORY_COPY}", color="black",
            linestyle="--", linewidth=1.2,
        )  # fmt: skip
    near = [(x, y) for x, y in link if min(sizes) / 4 <= x <= max(sizes) * 4]
    if near:
        axis.plot(
            *zip(*near, strict=True), label=f"ceiling: {LINK}", color="#666666",
            linestyle=":", linewidth=1.6,
        )  # fmt: skip
    axis.set_title(f"{operator}, {ranks} ranks", fontsize=10)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("bytes", fontsize=9)
    axis.set_ylabel("bus bandwidth, GB/s", fontsize=9)
    ticks = sorted(set(sizes))
    axis.set_xticks(ticks, [_size(n) for n in ticks], rotation=35, ha="right", fontsize=8)
    axis.set_xticks([], minor=True)
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(alpha=0.3)


def _ours(rows: Sequence[Row], factor: float = 1.0) -> Points:
    return _points({r.bytes: r.us_median for r in rows}, factor)


def _points(us: Mapping[int, float | None], factor: float) -> Points:
    return [
        (nbytes, nbytes / one / 1e3 * factor)
        for nbytes, one in sorted(us.items())
        if one is not None
    ]


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
