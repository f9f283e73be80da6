"""Show the progress of a command on the terminal of stderr, if there is one."""

from __future__ import annotations

import sys

_WIDTH = 30


class Progress:
    """Progress bar on one line, which is overwritten, and erased at the end."""

    def __init__(self, is_shown: bool = True) -> None:
        self._is_shown = is_shown and sys.stderr.isatty()

    def __call__(self, name: str, done: int, total: int) -> None:
        if not self._is_shown:
            return
        filled = _WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        line = f"[{bar}] {done}/{total} {name}" if done < total else ""
        # Erase to the end of the line, since the previous name may have been longer.
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)


def erase_line() -> None:
    """Erase an unfinished line on the terminal."""
    write_line("\r\x1b[K")


def write_line(text: str) -> None:
    """Write an unfinished line, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(text, end="", file=sys.stderr, flush=True)
