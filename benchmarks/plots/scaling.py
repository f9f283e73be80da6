"""Speedup over one rank, one panel per kind of work: strong above, weak below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plots.style import OURS, legend, looks, panels
from benchmarks.rows import NO_COMMUNICATION, ONE_BLOCK, ONE_RANK, Row


def scaling(rows: Sequence[Row], cores: int | None = None) -> Figure | None:
    """Plot the subject ``scaling`` on all numbers of ranks, bounded by the machine's ``cores``."""
    works: dict[str, list[Row]] = {}
    for row in rows:
        if row.subject == "scaling":
            works.setdefault(row.case, []).append(row)
    if not works:
        return None
    cases = sorted(works, key=lambda case: case.startswith("weak"))
    figure, axes = panels(len(cases), 4, 3.0, 2.7)
    for axis, case in zip(axes, cases, strict=True):
        _panel(axis, case, works[case], cores)
    legend(figure, axes)
    return figure


def _panel(axis: Any, case: str, rows: Sequence[Row], cores: int | None) -> None:
    ranks = sorted({1, *(r.ranks for r in rows)})
    is_strong = case.startswith("strong")
    one = {r.ranks: r.peer_us_median for r in rows if r.peer in (ONE_RANK, ONE_BLOCK)}
    alone = {r.ranks: r.peer_us_median for r in rows if r.peer == NO_COMMUNICATION}
    ours = {r.ranks: r.us_median for r in rows}

    def speedup(us: float | None, n: int) -> float | None:
        first = one.get(n)
        return None if us is None or first is None else first / us

    ideal = [n if is_strong else 1.0 for n in ranks]
    axis.plot(ranks, ideal, color="black", linestyle="--", linewidth=1, label="ceiling: ideal")
    if cores is not None and cores < max(ranks):
        bound = [min(n, cores) * (1 if is_strong else 1 / n) for n in ranks]
        axis.plot(ranks, bound, color="#666666", linestyle=":", label=f"ceiling: {cores} cores")
    for name, us, width in ((NO_COMMUNICATION, alone, 1.2), (OURS, ours, 2.2)):
        points = [(1, 1.0), *((n, speedup(us.get(n), n)) for n in ranks[1:])]
        points = [(n, y) for n, y in points if y is not None]
        is_ours = name == OURS
        axis.plot(
            *zip(*points, strict=True), label=name if is_ours else f"ceiling: {name}", marker="o",
            color=looks([OURS])[OURS].colour if is_ours else "#D55E00", linewidth=width,
            markersize=4,
        )  # fmt: skip
    kind, work, shape = case.split(", ", 2)
    axis.set_title(f"{kind}: {work}\n{shape}", fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(n) for n in ranks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("ranks", fontsize=9)
    axis.set_ylabel("speedup over 1 rank" if is_strong else "efficiency", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
