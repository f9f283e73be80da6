"""Print tables: in colour on a terminal if rich is installed, else as plain text."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from textwrap import fill

from gpudist.checks.columns import columns

_NARROWEST = 20
# Never break long words: users copy paths from the terminal.
_fill = partial(fill, break_long_words=False, break_on_hyphens=False)


def print_table(lines: Sequence[tuple[str, str]]) -> None:
    """Print rows of a name and a text; on a terminal, texts are wrapped to its width."""
    width = max(len(name) for name, _ in lines)
    if sys.stdout.isatty():
        indent = " " * (width + 2)
        columns = max(shutil.get_terminal_size().columns, len(indent) + _NARROWEST)
        lines = [
            (name, _fill(text, columns, initial_indent=indent, subsequent_indent=indent).lstrip())
            for name, text in lines
        ]
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
    """Print columns under their headings: the first left-aligned, the others right-aligned."""
    if sys.stdout.isatty() and _print_rich_columns(heading, lines):
        return
    print(columns([heading, *lines]))


def _print_rich_columns(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> bool:
    """Print with rich; return whether it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, header_style="bold cyan", pad_edge=False)
    for number, name in enumerate(heading):
        table.add_column(name, justify="right" if number else "left")
    for line in lines:
        # Print as plain text, because rich would parse a grid in brackets as markup.
        table.add_row(*map(Text, line))
    Console().print(table)
    return True
