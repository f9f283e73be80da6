"""The table of boxings in docs/global_tensors.md: ``python -m tests.sbp.boxing_table``."""

from __future__ import annotations

from fractions import Fraction
from math import prod

from gpudist.geometry.layout import Layout, Sbp, broadcast, partial_sum, split
from gpudist.geometry.routes import route, volume

RANKS = 4
SHAPE = (16, 16)
KINDS = (split(0), split(1), broadcast, partial_sum)


def moved(source: Sbp, target: Sbp) -> Fraction:
    """Cells that travel between ``RANKS`` ranks, over the number of cells of the tensor."""
    ends = [Layout(tuple(range(RANKS)), (RANKS,), (one,), SHAPE) for one in (source, target)]
    if source == target:
        return Fraction(0)
    return Fraction(volume(route(*ends)), prod(SHAPE))


def table() -> str:
    """Markdown: a row for each source, a column for each target."""
    lines = [
        "| from, to | " + " | ".join(f"`{one}`" for one in KINDS) + " |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    for source in KINDS:
        cells = " | ".join(str(moved(source, target)) for target in KINDS)
        lines.append(f"| `{source}` | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
