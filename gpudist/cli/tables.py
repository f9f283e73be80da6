"""Print tables: in colour on a terminal if rich is installed, else as plain text."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from textwrap import fill

from gpudist.checks.columns import columns, split_columns

_NARROWEST = 20
# Never break long words: users copy paths from the terminal.
_fill = partial(fill, break_long_words=False, break_on_hyphens=False)


def print_table(lines: Sequence[tuple[str, str]]) -> None:
    """Print rows of a name and a text; on a terminal, texts are wrapped to its width."""
    width = max(len(name) for name, _ in lines)
    if sys.stdout.isatty():
        indent = " " * (width + 2)
        wide = max(terminal_width(), len(indent) + _NARROWEST)
        lines = [
            (name, _fill(text, wide, initial_indent=indent, subsequent_indent=indent).lstrip())
            for name, text in lines
        ]
    for name, text in lines:
        _print_line(name.ljust(width), f"  {text}")


def print_text(text: str) -> None:
    """Print a paragraph; on a terminal, it is wrapped to its width."""
    print(_fill(text, terminal_width()) if sys.stdout.isatty() else text)


def print_columns(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print columns under their headings: the first left-aligned, the others right-aligned.

    Columns beyond the terminal's width, or beyond 80 characters in a file, become further tables,
    which repeat the first column.
    """
    for number, table in enumerate(split_columns([heading, *lines], terminal_width())):
        if number:
            print()
        head, *body = columns(table).splitlines()
        _print_line(head)
        print("\n".join(body))


def _print_line(heading: str, text: str = "") -> None:
    """Print a line, whose heading is coloured on a terminal."""
    if sys.stdout.isatty():
        with suppress(ImportError):
            from rich.console import Console
            from rich.text import Text

            Console(soft_wrap=True).print(Text.assemble((heading, "bold cyan"), text))
            return
    print(heading + text)


def terminal_width() -> int:
    """Return the number of characters in a line; 80 if the output is a file."""
    return shutil.get_terminal_size().columns
