"""Align the cells of a table in columns."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format ``rows``; the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    lines = ([f(c, w) for f, c, w in zip(align, row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def split_columns(
    rows: Sequence[Sequence[str]], width: int, left: int = 1
) -> list[list[tuple[str, ...]]]:
    """Split a table into tables of at most ``width`` characters, if there are such tables.

    Args:
        rows: heading and lines.
        width: number of characters in a line.
        left: number of columns that every table begins with.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = sum(widths[:left]) + 2 * (left - 1)
    groups: list[list[int]] = [[]]
    used = first
    for column, needed in enumerate(widths[left:], left):
        if groups[-1] and used + 2 + needed > width:
            groups.append([])
            used = first
        groups[-1].append(column)
        used += 2 + needed
    return [[(*row[:left], *(row[i] for i in group)) for row in rows] for group in groups]
