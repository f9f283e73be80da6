"""A progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown(count: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call whenever one of ``count`` experiments is done."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("experiments", total=count)
        yield lambda: progress.advance(task)
