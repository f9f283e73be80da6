"""Tables on a terminal, in colour where rich is installed, and plain everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(lines: Sequence[tuple[str, str]]) -> None:
    """A name and a text each."""
    width = max(len(name) for name, _ in lines)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            for name, text in lines:
                styled = Text.assemble((name.ljust(width), "bold cyan"), "  ", text)
                Console(soft_wrap=True).print(styled)
            return
    for name, text in lines:
        print(f"{name:<{width}}  {text}")


def print_columns(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Columns of texts under their headings; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heading, *lines, strict=True)]
    for line in (heading, *lines):
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
