"""Align the cells of a table in columns."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format ``rows``; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    lines = ([f(c, w) for f, c, w in zip(align, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
