"""Table of cases on the terminal: a line with the case's name, and the rows of its numbers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from textwrap import fill

from gpudist.checks.columns import columns


def case_table(heading: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Format rows of a case and its numbers in columns, under a line for each case.

    The first column is left-aligned. Names of cases are wrapped to the terminal's width,
    or to 80 characters in a file.
    """
    width = shutil.get_terminal_size().columns
    head, *body = columns([heading, *(numbers for _, numbers in rows)], 1).splitlines()
    lines = [head]
    previous = ""
    for (case, _), line in zip(rows, body, strict=True):
        if case != previous:
            lines.append(fill(case, width, break_long_words=False, break_on_hyphens=False))
            previous = case
        lines.append(line)
    return "\n".join(lines)
